"""The command line: what it offers, how fast it starts, and what becomes of errors."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from manus_fast import __version__, cli
from manus_fast.commands import common
from manus_fast.errors import UserError, is_users_mistake, sentence, write_log

ROOT = Path(__file__).resolve().parent.parent


def run(*words, **more):
    return subprocess.run(
        [sys.executable, "-m", "manus_fast.cli", *words], capture_output=True, text=True, check=False, **more
    )


def one_line(text):
    assert text.endswith("\n") and text.count("\n") == 1
    return text.strip()


def test_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("demo", "sft", "ppo", "eval", "compare", "bench", "info", "doctor", "models", "env"):
        assert re.search(rf"│ {command} ", shown), command


def test_nothing_heavy_is_imported_before_a_command_runs():
    code = (
        "import sys; from manus_fast import cli; cli.main(['--version'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'omegaconf', 'manus_fast.trainer', 'manus_fast.ops'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [__version__, "[]"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "No such command 'nope'"),
        (["ppo", "--nope"], "No such option: --nope"),
        (["ppo", "--num_rollouts", "x"], "'--num_rollouts'"),
        (["ppo", "--num_rollouts"], "requires an argument"),
        (["eval"], "Missing argument 'SUITE'"),
        (["compare", "a", "b"], "eval: expected an eval.json, found no file at 'a'"),
        (["models", "get", "gpt5"], "models get: expected smollm2, got 'gpt5'"),
        (["bench", "nope"], "bench: expected one of"),
        (["ppo", "--config", "nope"], "--config: expected a YAML file or the name of a shipped one"),
        (["ppo", "--reward_fn", "fromat"], "got 'fromat': did you mean 'format'?"),
        (["ppo", "--bf16", "maybe"], "--bf16: expected true or false, got 'maybe'"),
        (["ppo", "--save_strategy", "often"], "--save_strategy: expected no, steps or epoch, got 'often'"),
        (["ppo", "--batch_size", "9", "--per_device_train_batch_size", "4"], "--batch_size: expected 4"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(capsys, words, message):
    assert cli.main(words) == 2
    line = one_line(capsys.readouterr().err)
    assert line.startswith("manus-fast: ") and message in line


def test_no_command_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "Usage: manus-fast" in capsys.readouterr().out


def raiser(error):
    def command(*_a, **_k):
        raise error

    return command


def test_our_errors_are_one_line_with_a_log_and_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_invoke", raiser(RuntimeError("the pool\nis gone")))
    assert cli.main(["info"]) == 1
    line = one_line(capsys.readouterr().err)
    found = re.fullmatch(r"manus-fast: RuntimeError: the pool is gone \(traceback in (\S+)\)", line)
    with open(found[1]) as log:
        text = log.read()
    assert "Traceback" in text and "in command" in text


def test_what_the_machine_refuses_is_one_sentence_and_exit_code_2(capsys, monkeypatch):
    """A full disk, a quota, a limit on files: nobody needs a traceback to mend them."""
    for error, text in (
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a/versions.json"),
            "runs/a/versions.json: No space left",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        (OSError(errno.EMFILE, "Too many open files", "x"), "x: Too many open files"),
    ):
        monkeypatch.setattr(cli, "_invoke", raiser(error))
        assert cli.main(["info"]) == 2
        assert one_line(capsys.readouterr().err).startswith(f"manus-fast: {text}")


def test_a_traceback_that_cannot_be_written_is_no_second_error(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_invoke", raiser(RuntimeError("lost")))
    monkeypatch.setattr("tempfile.mkstemp", raiser(OSError(errno.ENOSPC, "No space left on device")))
    assert cli.main(["info"]) == 1
    line = one_line(capsys.readouterr().err)
    assert line == "manus-fast: RuntimeError: lost (no room for the traceback, which --debug shows)"


def test_debug_lets_the_error_through(monkeypatch):
    monkeypatch.setattr(cli, "_invoke", raiser(RuntimeError("x")))
    with pytest.raises(RuntimeError):
        cli.main(["info", "--debug"])


def run_command(monkeypatch, command):
    """What `main` makes of a command of this body."""
    from manus_fast.commands import machine

    app = typer.Typer()
    app.command("info")(lambda: command())  # typer makes options of parameters
    app.command("doctor")(machine.doctor)
    monkeypatch.setattr(cli, "app", app)
    return cli.main(["info"])


def test_signals_end_a_command_in_one_sentence(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    for number, code, text in ((signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")):
        cleaned = []

        def command(number=number, cleaned=cleaned):
            try:
                os.kill(os.getpid(), number)
                time.sleep(5)
            finally:
                cleaned.append(True)

        assert run_command(monkeypatch, command) == code and cleaned
        assert one_line(capsys.readouterr().err) == f"manus-fast: {text}"
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGINT, inherited)


def test_exit_codes_of_commands(monkeypatch, capsys):
    def leave(code):
        raise typer.Exit(code)

    assert run_command(monkeypatch, lambda: leave(3)) == 3 and run_command(monkeypatch, lambda: None) == 0
    assert run_command(monkeypatch, raiser(EOFError("the worker is gone"))) == 1
    assert "EOFError: the worker is gone" in capsys.readouterr().err
    assert run_command(monkeypatch, raiser(BrokenPipeError(errno.EPIPE, "Broken pipe"))) == 1  # not of our output
    assert "Broken pipe" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # argparse of a benchmark
        run_command(monkeypatch, raiser(SystemExit(2)))


def test_a_reader_that_goes_away_is_no_error():
    """As `manus-fast … | head -1`: by plain writes and by rich's."""
    code = (
        "import sys, typer; from manus_fast import cli; from rich.console import Console\n"
        "def info():\n    [{} for _ in range(20000)]\n"
        "cli.app = typer.Typer(); cli.app.command('info')(info); cli.app.command('x')(lambda: None)\n"
        "sys.exit(cli.main(['info']))"
    )
    for call in ("typer.echo('x' * 80)", "print('x' * 80)", "Console().print('x' * 80)"):
        process = subprocess.Popen(
            [sys.executable, "-c", code.format(call)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait() == 141 and process.stderr.read() == b""
        process.stderr.close()


def test_bench_help_names_its_arguments(capsys):
    assert cli.main(["bench", "--help"]) == 0
    assert "Benchmark to run" in capsys.readouterr().out


def test_interrupt(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_invoke", raiser(KeyboardInterrupt()))
    assert cli.main(["info"]) == 130
    assert one_line(capsys.readouterr().err) == "manus-fast: interrupted"


def caught(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("expected an error")


def test_whose_mistake_an_error_is():
    import numpy as np

    from manus_fast.config import load_config
    from manus_fast.envs.config import EnvironmentConfig

    # A check of ours, a UserError, a file that may not be written: the user's.
    assert is_users_mistake(caught(lambda: load_config(EnvironmentConfig, None, ["nam=x"])))
    assert is_users_mistake(caught(raiser(UserError("x"))))
    assert is_users_mistake(PermissionError(13, "Permission denied", "/x"))
    # A ValueError out of another library, of a built-in called by our code, or of a test: not a check of ours.
    assert not is_users_mistake(caught(lambda: np.zeros(3).reshape(2)))
    assert not is_users_mistake(caught(raiser(ValueError("x"))))
    assert not is_users_mistake(ValueError("never raised"))
    assert not is_users_mistake(caught(lambda: common.overrides({"a": 1}, [int("x")])))
    assert not is_users_mistake(caught(raiser(FileNotFoundError(2, "No such file", "/x"))))
    source = "def f():\n    return int('x')\ndef g():\n    raise ValueError('a: expected b, got c')\n"
    module = {"__name__": "manus_fast.made_up"}
    exec(compile(source, "made_up.py", "exec"), module)
    assert not is_users_mistake(caught(module["f"]))
    assert is_users_mistake(caught(module["g"]))


def test_sentences():
    assert sentence(PermissionError(13, "Permission denied", "/x")) == "/x: Permission denied"
    assert sentence(KeyError("a")) == "no such key: 'a'"
    assert sentence(ValueError("a\n  b")) == "a b"
    assert sentence(RuntimeError()) == "RuntimeError"


def test_log_file():
    path = write_log(caught(raiser(RuntimeError("x"))))
    with open(path) as file:
        assert file.read().startswith("Traceback")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ppo", "--debug", "a.b=1"], ["--debug", "ppo", "a.b=1"]),
        (["ppo", "--bf16"], ["ppo", "--bf16", "true"]),
        (["ppo", "--bf16", "--use_wandb", "false"], ["ppo", "--bf16", "true", "--use_wandb", "false"]),
        (["ppo", "--bf16", "a.b=1"], ["ppo", "--bf16", "true", "a.b=1"]),
        (["ppo", "--bf16", "true"], ["ppo", "--bf16", "true"]),
    ],
)
def test_order_of_words(words, expected):
    assert cli._order(words) == expected


def test_flags_become_overrides_and_words_win():
    flags = {"a.b": 3, "a.c": None, "a.d": "x: [y", "a.e": True, "a.f": 1e-6, "a.g": "null"}
    words = common.overrides(flags, ["a.b=4"])
    assert words == ["a.b=3", 'a.d="x: [y"', "a.e=true", "a.f=1e-06", 'a.g="null"', "a.b=4"]
    from omegaconf import OmegaConf

    read = OmegaConf.to_container(OmegaConf.from_dotlist(words))["a"]
    assert read == {"b": 4, "d": "x: [y", "e": True, "f": 1e-6, "g": "null"}


def test_shipped_configs_are_found_by_name():
    path = common.find_config("ppo_household", "x")
    assert path.name == "ppo_household.yaml" and path == common.find_config(None, "ppo_household.yaml")


def test_info_prints_facts_of_this_machine(capsys):
    import torch

    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"] == torch.__version__ and facts["versions"]["manus_fast"] == __version__
    assert facts["extension"]["built"] is True
    assert facts["cuda"]["usable"] == (facts["cuda"]["built"] and torch.cuda.is_available())
    assert "household" in facts["environments"] and facts["engines"]["hf"] == "ready"
    for entry in facts["ops"].values():
        assert entry["backends"]["reference"] == "ready" and entry["backends"][entry["chosen"]] == "ready"
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "CUDA built" in shown and "household" in shown and "gae" in shown


def test_doctor_finds_nothing_to_mend_here_and_says_what_it_finds_elsewhere(capsys, tmp_path, monkeypatch):
    assert cli.main(["doctor", "--output_dir", str(tmp_path)]) == 0
    assert "C++ compiler" in capsys.readouterr().out
    assert cli.main(["doctor", "--output_dir", str(tmp_path / "none"), "--json"]) == 1
    shown = capsys.readouterr()
    states = {check["name"]: check["state"] for check in json.loads(shown.out)}
    assert states["writing"] == "problem" and states["python"] == "ok"
    assert "1 to mend: writing" in shown.err


def test_bench_lists_what_it_can_run(capsys):
    assert cli.main(["bench"]) == 0
    assert "logprob" in capsys.readouterr().out.split()


def test_compare_of_two_files(capsys, tmp_path):
    from test_evaluate import report

    report("a", {"t0"}).save(tmp_path / "a.json")
    (tmp_path / "b").mkdir()
    report("b", {"t0", "t1", "t2"}).save(tmp_path / "b" / "eval.json")
    assert cli.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b")]) == 0
    shown = capsys.readouterr().out
    assert "b against a" in shown and "30.0 % against 10.0 %" in shown and "+20.0 points" in shown


def test_as_a_process():
    done = run("nope")
    assert done.returncode == 2 and done.stdout == "" and one_line(done.stderr)
    assert run("--version").stdout.strip() == __version__
    package = subprocess.run(
        [sys.executable, "-m", "manus_fast", "--version"], capture_output=True, text=True, check=True
    )
    assert package.stdout.strip() == __version__


def test_the_package_offers_its_names_lazily():
    code = (
        "import sys, manus_fast; assert 'torch' not in sys.modules\n"
        "from manus_fast import load_config; assert 'torch' not in sys.modules\n"
        "print(set(manus_fast.__all__) <= set(dir(manus_fast)))\n"
        "try: manus_fast.nothing\nexcept AttributeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True", "module 'manus_fast' has no attribute 'nothing'"]


def test_every_offered_name_exists():
    import manus_fast

    for name in manus_fast.__all__:
        # A name that is a part of the package as well would be the module or the function, by the order of imports.
        assert getattr(manus_fast, name) is not None and not isinstance(getattr(manus_fast, name), type(cli)), name


def test_the_closing_table_is_whole_where_there_is_no_terminal(capsys, tmp_path):
    from test_evaluate import report

    from manus_fast.commands import show
    from manus_fast.demo import Stage

    folder = tmp_path / ("long" * 20)
    show.stages(
        [Stage("SFT", folder, 61.0, report("a", {"t0"})), Stage("SFT continued", folder, 61.0, report("b", {"t1"}))],
        200.0,
    )
    shown = capsys.readouterr().out
    assert "\u2026" not in shown and "SFT continued" in shown and "95 % interval" in shown and "10.0 %" in shown
    assert str(folder / "model") in shown
