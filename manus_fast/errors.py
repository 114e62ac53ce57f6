"""What becomes of an error at the command line: the user's mistakes are one sentence and exit code 2; ours are one
sentence, where the traceback went, and exit code 1."""

from __future__ import annotations

import dis
import errno
import os
import tempfile
import traceback

DONE, OURS, USERS = 0, 1, 2

# What the machine refuses, and the user can mend: permission, space, limits, a name that is taken by another kind.
_REFUSED = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE),
    *(errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR),
}

_RAISE = dis.opmap["RAISE_VARARGS"]


class UserError(Exception):
    """A mistake that the user can mend; its text is the one sentence that they read."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does: files are left whole, workers are ended."""


def is_users_mistake(error: BaseException) -> bool:
    """Whether the user can mend it: a UserError, a file that cannot be written, or a check of this package.

    The checks raise ValueError by hand (`raise ValueError("key: expected …")`), which a call that merely fails inside
    another library never does from here; so it is the place of the raise that decides, not the text.
    """
    if isinstance(error, UserError):
        return True
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return True
    if not isinstance(error, ValueError):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    module = str(last.tb_frame.f_globals.get("__name__", ""))
    ours = module.split(".")[0] in ("manus_fast", "benchmarks")
    return ours and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


def sentence(error: BaseException) -> str:
    """The error's text on one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):
        text = f"no such key: {text}"
    return text or type(error).__name__


def write_log(error: BaseException) -> str:
    """Writes the traceback to a file in the temporary folder and returns its path."""
    handle, path = tempfile.mkstemp(prefix="manus-fast-", suffix=".log", text=True)
    with os.fdopen(handle, "w") as file:
        file.write("".join(traceback.format_exception(error)))
    return path
