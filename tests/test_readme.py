# SPDX-License-Identifier: Apache-2.0
"""The README's example runs as printed, on the real model."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_example_runs_and_saves_laps():
  text = (ROOT / "README.md").read_text()
  (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  tokens, laps = map(
    int, re.search(r"(\d+) tokens in (\d+) laps", done.stdout).groups()
  )
  assert 0 < laps < tokens


def test_every_relative_link_leads_somewhere():
  for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
      if not target.startswith("http"):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
