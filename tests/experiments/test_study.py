# SPDX-License-Identifier: Apache-2.0
"""A toy study through the entry point; what a run directory holds."""

import dataclasses
import enum
import json
import pathlib
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _rundir, studies, study

TOY = '''"""Doubles a number.

More text.
"""
import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """One number.

  Attributes:
    number: what is doubled.
  """
  number: int = 2
  quick: bool = False
  out: pathlib.Path | None = None

  def __post_init__(self):
    if self.number < 0:
      raise ValueError(f"number = {self.number}: must be >= 0")


def run(config):
  (config.out / "own.txt").write_text("x")
  return {"doubled": 2.0 * config.number, "identical": "3/3"}
'''


@pytest.fixture
def toys(tmp_path, monkeypatch):
  """A folder that counts as part of `experiments.studies`."""
  folder = tmp_path / "toys"
  folder.mkdir()
  (folder / "toy.py").write_text(TOY)
  (folder / "_helper.py").write_text("")
  monkeypatch.setattr(studies, "__path__", [str(folder)])
  monkeypatch.setattr(study._setup, "use_compilation_cache", lambda: None)
  monkeypatch.chdir(tmp_path)
  before = set(sys.modules)
  yield folder
  for name in set(sys.modules) - before:
    if name.startswith(f"{studies.__name__}."):
      del sys.modules[name]
      delattr(studies, name.rpartition(".")[2])


def test_a_study_runs(toys, tmp_path, capsys):
  assert study.main(["toy", "--number", "21", "--quick"]) == 0
  assert capsys.readouterr().out.splitlines()[-1] == "doubled=42 identical=3/3"
  (out,) = (tmp_path / "runs").iterdir()
  assert out.name.startswith("toy-")
  assert (out / "own.txt").exists()
  config = json.loads((out / "config.json").read_text())
  assert config["study"] == "toy"
  assert config["config"]["number"] == 21
  result = json.loads((out / "result.json").read_text())
  assert result["figures"] == {"doubled": 42.0, "identical": "3/3"}
  assert result["quick"] is True
  assert result["wall_s"] >= 0
  named = json.loads((out / "versions.json").read_text())
  assert named["jax"] == jax.__version__
  assert named["device_kind"] == jax.devices()[0].device_kind


def test_out_is_used_and_not_overwritten(toys, tmp_path, capsys):
  out = tmp_path / "mine"
  assert study.main(["toy", "--out", str(out)]) == 0
  assert (out / "result.json").exists()
  with pytest.raises(ValueError, match="must be a new or empty directory"):
    study.main(["toy", "--out", str(out)])
  assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("argv, status", [([], 2), (["no"], 2), (["-h"], 0)])
def test_listing(toys, capsys, argv, status):
  (toys / "broken.py").write_text("import no_such_package\n")
  assert study.main(argv) == status
  out, err = capsys.readouterr()
  text = err if status else out
  assert (out if status else err) == ""
  lines = [line.split() for line in text.splitlines()]
  assert ["toy", "Doubles", "a", "number."] in lines
  assert ["broken"] in lines
  assert "helper" not in text
  assert ("no study 'no'" in text) == (argv == ["no"])


def test_impossible_settings_end_before_a_directory_is_made(
  toys, tmp_path, capsys
):
  for options in (["--number", "-3"], ["--number", "x"], ["--nmber", "3"]):
    with pytest.raises(SystemExit) as caught:
      study.main(["toy", *options])
    assert caught.value.code == 2
    assert "number" in capsys.readouterr().err
  assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
  "old, new, wrong",
  [
    ("class Config", "class Settings", "Config: must be a dataclass"),
    ("frozen=True", "frozen=False", "Config: must be frozen"),
    ("quick: bool = False", "quick: bool = True", "must have 'quick'"),
    ("out: pathlib", "where: pathlib", "must have 'out'"),
    ("def run", "def go", "run: must be a function"),
  ],
)
def test_what_is_no_study_is_refused(toys, capsys, old, new, wrong):
  assert old in TOY
  (toys / "bad.py").write_text(TOY.replace(old, new))
  assert study.main(["bad"]) == 2
  assert wrong in capsys.readouterr().err


def test_a_failing_run_leaves_its_config(toys, tmp_path):
  (toys / "fails.py").write_text(TOY.replace("return {", "1 / 0\n  return {"))
  with pytest.raises(ZeroDivisionError):
    study.main(["fails", "--out", str(tmp_path / "f")])
  names = {path.name for path in (tmp_path / "f").iterdir()}
  assert names == {"config.json", "versions.json", "own.txt"}


def test_run_dirs_are_unique(tmp_path):
  made = [_rundir.new_run_dir("a", tmp_path / "runs") for _ in range(5)]
  assert len(set(made)) == 5
  assert all(path.is_dir() for path in made)
  for name in ("", "a/b", ".."):
    with pytest.raises(ValueError, match="one plain path component"):
      _rundir.new_run_dir(name, tmp_path)


class Colour(enum.Enum):
  RED = 1


class Pair(typing.NamedTuple):
  left: int
  right: float


@dataclasses.dataclass(frozen=True)
class Inner:
  width: int = 3


@dataclasses.dataclass(frozen=True)
class Outer:
  inner: Inner = Inner()
  path: pathlib.Path | None = None
  names: tuple[str, ...] = ("a",)
  function: typing.Any = dataclasses.replace


def test_json_is_strict(tmp_path):
  path = tmp_path / "x.json"
  _rundir.write_json(
    path,
    {
      "nan": float("nan"),
      "inf": [np.float32("-inf"), 1.5],
      "array": np.array([[1.0, np.nan]], np.float32),
      "jax": jnp.arange(2, dtype=jnp.int32),
      "scalar": np.int64(3),
      "flag": np.bool_(True),
      "path": pathlib.Path("a") / "b",
      "pair": Pair(1, float("inf")),
      "inner": Inner(),
      "colour": Colour.RED,
      "dtype": np.dtype("float32"),
      "set": {"b", "a"},
      4: None,
    },
  )

  def refuse(name):
    raise AssertionError(f"{name} is not JSON")

  assert json.loads(path.read_text(), parse_constant=refuse) == {
    "nan": None,
    "inf": [None, 1.5],
    "array": [[1.0, None]],
    "jax": [0, 1],
    "scalar": 3,
    "flag": True,
    "path": "a/b",
    "pair": {"left": 1, "right": None},
    "inner": {"width": 3},
    "colour": "RED",
    "dtype": "float32",
    "set": ["a", "b"],
    "4": None,
  }
  with pytest.raises(TypeError, match=r"a\.0: a object has no form"):
    _rundir.write_json(path, {"a": [object()]})
  with pytest.raises(TypeError, match="must be a text or an integer"):
    _rundir.write_json(path, {(1, 2): 3})


def test_config_dict_names_types():
  assert _rundir.config_dict(Outer(path=pathlib.Path("p"))) == {
    "class": "Outer",
    "inner": {"class": "Inner", "width": 3},
    "path": "p",
    "names": ["a"],
    "function": "dataclasses.replace",
  }
  with pytest.raises(TypeError, match="must be an instance"):
    _rundir.config_dict(Outer)


def test_figures_line():
  line = _rundir.figures_line(
    speedup=2.345678,
    identical="12/12",
    laps=31,
    rate=np.float32(0.25),
    tokens=jnp.int32(7),
    unknown=float("nan"),
    note="two words",
  )
  assert line == (
    "speedup=2.346 identical=12/12 laps=31 rate=0.25 tokens=7 unknown=nan "
    "note=two_words"
  )


def test_versions_without_devices_leave_the_backend_alone():
  named = _rundir.versions(devices=False)
  assert named["numpy"] == np.__version__
  assert named["device_kind"] is None
  assert named["wanspec"]
  assert named["cpu_count"] >= named["cpu_usable"] >= 1
