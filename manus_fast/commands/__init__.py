"""The commands behind `manus-fast`, one module a family. Heavy imports happen inside the commands."""
