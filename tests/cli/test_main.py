"""The command line: quick help, overrides of every key, messages for the person."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
import types

import pytest
from absl import flags

from glm_jax.cli.flags import UsageError, parse
from glm_jax.cli.main import VERBS, main
from glm_jax.config.strict import ConfigError

CONFIG = """
    from dataclasses import dataclass
    from glm_jax.config.strict import default_config

    @dataclass(frozen=True)
    class Sao:
        lr: float = 1
        clip: float | None = None
        name: str | None = None
        sizes: tuple[int, ...] = (1, 2)

    @dataclass(frozen=True)
    class Run:
        steps: int
        sao: Sao = Sao()
        on: bool = True

    def get_config():
        return default_config(Run)
"""


@pytest.fixture
def config(tmp_path) -> str:
    (tmp_path / "config.py").write_text(textwrap.dedent(CONFIG))
    return f"--config={tmp_path / 'config.py'}"


@pytest.fixture
def verb(monkeypatch):
    """Puts a function in the place of the verb `train`."""

    def put(run):
        monkeypatch.setitem(sys.modules, "glm_jax.cli.train", types.SimpleNamespace(run=run))

    return put


def test_help_names_every_verb_within_two_seconds_and_without_jax():
    code = "import sys; from glm_jax.cli.main import main; main(['--help']); sys.exit('jax' in sys.modules)"
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert time.monotonic() - start < 2.0
    assert done.returncode == 0
    assert all(f"\n  {verb}" in done.stdout for verb in VERBS)


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "glm_jax", "trian"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "glm-jax: 'trian' is no verb; did you mean 'train'? (glm-jax --help)\n"


def test_a_verb_gets_what_follows_it_and_gives_the_exit_code(verb):
    seen = []
    verb(lambda argv: seen.append(argv) or 7)
    assert main(["train", "--a", "b"]) == 7
    assert seen == [["--a", "b"]]


def test_errors_of_this_project_are_shown_without_a_traceback(verb, capsys):
    def run(argv):
        raise ConfigError("1 problem in config:\n  - config.lr is 'x'")

    verb(run)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "glm-jax train: 1 problem in config:\n  - config.lr is 'x'\n"


def test_any_other_error_keeps_its_traceback(verb):
    def run(argv):
        return 1 / 0

    verb(run)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_an_interrupt_ends_with_its_own_code(verb, capsys):
    def run(argv):
        raise KeyboardInterrupt

    verb(run)
    assert main(["train"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_overrides_reach_every_key_with_its_type_wherever_they_stand(config):
    argv = ["--config.sao.lr=1e-6", config, "--workdir=w", "--config.steps=4", "--config.sao.clip=2"]
    command = parse("train", [*argv, "--config.sao.name=x", "--config.sao.sizes=(3, 4)", "--noconfig.on"])
    found = command.config.to_dict()
    assert found == {"steps": 4, "sao": {"lr": 1e-6, "clip": 2.0, "name": "x", "sizes": (3, 4)}, "on": False}
    assert str(command.workdir) == "w" and isinstance(found["sao"]["clip"], float)


def test_a_verb_defines_flags_and_arguments_of_its_own(config):
    def define(values):
        flags.DEFINE_bool("dry_run", False, "print the config", flag_values=values)

    command = parse("bench", ["rl", "--dry_run"], define, positional=("what",), required=())
    assert command.positional == ("rl",) and command.flags.dry_run and command.config is None
    with pytest.raises(UsageError, match="got nothing where WHAT is wanted"):
        parse("bench", [], define, positional=("what",), required=())


def test_every_unknown_key_is_told_with_the_nearest_one(config):
    with pytest.raises(UsageError) as caught:
        parse("train", [config, "--workdir=w", "--config.soa.lr=1", "--config.sao.lrr=1", "--config.steps.x=1"])
    text = str(caught.value)
    assert "config.soa is no known key; did you mean config.sao?" in text
    assert "config.sao.lrr is no known key; did you mean config.sao.lr?" in text
    assert "config.steps is None, which has no keys of its own" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config.steps=x"], "flag --config.steps=x: invalid literal for int"),
        (["--wrkdir=3"], "Unknown command line flag 'wrkdir'. Did you mean: workdir"),
        (["loose"], "got loose where no argument without -- is wanted"),
    ],
)
def test_a_wrong_flag_is_a_clear_error(config, argv: list[str], message: str):
    with pytest.raises(UsageError, match=message):
        parse("train", [config, "--workdir=w", *argv])


def test_missing_flags_are_told_together():
    with pytest.raises(UsageError, match="--config and --workdir missing"):
        parse("train", [])
    with pytest.raises(UsageError, match="--config.a=1 sets a key of a config, and --config is missing"):
        parse("train", ["--config.a=1"], required=())


def test_a_config_file_that_fails_is_told_with_its_place(tmp_path):
    with pytest.raises(UsageError, match="nowhere.py: there is no such file"):
        parse("train", [f"--config={tmp_path}/nowhere.py", "--workdir=w"])
    (tmp_path / "bad.py").write_text("def get_config():\n    return 1 / 0\n")
    with pytest.raises(UsageError, match="fails at .*bad.py:2: ZeroDivisionError: division by zero"):
        parse("train", [f"--config={tmp_path}/bad.py", "--workdir=w"])
    (tmp_path / "odd.py").write_text("def get_config():\n    return [1]\n")
    with pytest.raises(UsageError, match="returned a list; it has to be a ConfigDict"):
        parse("train", [f"--config={tmp_path}/odd.py", "--workdir=w"])


def test_help_of_a_verb_lists_its_flags(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("train", ["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "usage: glm-jax train [flags]" in text and "--config" in text and "--workdir" in text
