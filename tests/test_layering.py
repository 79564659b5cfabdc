# SPDX-License-Identifier: Apache-2.0
"""Imports run one way; the wire knows no jax; nothing is pickled."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Each may import those before it, never those behind it.
ORDER = ("wanspec_jax", "trees", "drafters", "training", "experiments")
MAX_LINES = 500
DYNAMIC = "a name known at run time only"
# What can run code that a file or a peer has sent.
UNSAFE = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal")
UNSAFE += ("shelve", "joblib")
FILES = sorted(
  path for package in ORDER for path in (ROOT / package).rglob("*.py")
)


def _name(path):
  """Returns the dotted name of the package that a module lies in."""
  return ".".join(path.relative_to(ROOT).parent.parts)


def _imports(source, package):
  """Returns `(line, absolute dotted name)` of all imports, at any depth."""
  found = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      found += [(node.lineno, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      parts = package.split(".")[: -node.level + 1 or None]
      base = [*(parts if node.level else []), *filter(None, [node.module])]
      found += [
        (node.lineno, ".".join([*base, alias.name])) for alias in node.names
      ]
    elif isinstance(node, ast.Call) and node.args:
      callee = ast.unparse(node.func)
      name = node.args[0]
      if isinstance(name, ast.JoinedStr):  # what stands before the first field
        name = name.values[0]
      if callee in ("__import__", "importlib.import_module", "import_module"):
        known = isinstance(name, ast.Constant)
        found.append((node.lineno, str(name.value) if known else DYNAMIC))
  return found


def _backward(source, package):
  """Returns the imports that run against the order."""
  mine = ORDER.index(package.split(".")[0])
  forbidden = {*ORDER[mine + 1 :], "tests"}
  if mine + 1 < len(ORDER):
    forbidden.add(DYNAMIC)
  return [
    (line, name)
    for line, name in _imports(source, package)
    if name.split(".")[0] in forbidden
  ]


def test_the_scan_sees_what_it_should():
  source = """
import numpy, experiments.serve as x
from drafters import none
def f():
  from .._tail import plan
  from . import y
  import importlib
  importlib.import_module("training")
  importlib.import_module(f"experiments.configs.{x}")
  importlib.import_module(f"{x}.y")
"""
  names = [name for _, name in _imports(source, "wanspec_jax.verify")]
  assert names[:3] == ["numpy", "experiments.serve", "drafters.none"]
  assert set(names[3:]) == {
    "wanspec_jax._tail.plan",
    "wanspec_jax.verify.y",
    "importlib",
    "training",
    "experiments.configs.",
    DYNAMIC,
  }
  assert [n for _, n in _backward(source, "wanspec_jax.verify")] == [
    "experiments.serve",
    "drafters.none",
    "training",
    "experiments.configs.",
    DYNAMIC,
  ]
  assert [n for _, n in _backward(source, "training")] == [
    "experiments.serve",
    "experiments.configs.",
    DYNAMIC,
  ]
  assert _backward(source, "experiments") == []


def test_all_packages_are_scanned():
  assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(ORDER)


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_one_way(package):
  wrong = [
    f"{path.relative_to(ROOT)}:{line}: {name}"
    for path in FILES
    if path.relative_to(ROOT).parts[0] == package
    for line, name in _backward(path.read_text("utf-8"), _name(path))
  ]
  assert not wrong


def test_nothing_is_pickled():
  """Neither imported nor asked of numpy."""
  wrong = []
  for path in FILES:
    source = path.read_text("utf-8")
    where = path.relative_to(ROOT)
    wrong += [
      f"{where}:{line}: {name}"
      for line, name in _imports(source, _name(path))
      if name.split(".")[0] in UNSAFE
    ]
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        off = isinstance(node.value, ast.Constant) and not node.value.value
        wrong += [] if off else [f"{where}:{node.value.lineno}: allow_pickle"]
  assert not wrong


def test_modules_stay_short():
  long = {
    str(path.relative_to(ROOT)): lines
    for path in FILES
    if (lines := len(path.read_text("utf-8").splitlines())) > MAX_LINES
  }
  assert not long


def test_packages_only_re_export():
  """`__init__.py` is a docstring and `from x import y as y`."""
  for path in FILES:
    if path.name != "__init__.py":
      continue
    for node in ast.parse(path.read_text("utf-8")).body:
      if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        continue
      assert isinstance(node, ast.ImportFrom), f"{path}:{node.lineno}"
      for alias in node.names:
        assert alias.asname == alias.name, f"{path}:{node.lineno}"


def test_the_wire_imports_no_jax():
  """Neither itself nor through what it imports: a fresh process tells."""
  wire = ROOT / "wanspec_jax" / "wire"
  named = [
    name
    for path in wire.glob("*.py")
    for _, name in _imports(path.read_text("utf-8"), _name(path))
  ]
  assert not [n for n in named if n.split(".")[0] in ("jax", "jaxlib", "flax")]
  code = "import sys, wanspec_jax.wire; print('jax' in sys.modules)"
  result = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
    check=True,
  )
  assert result.stdout.strip() == "False"
