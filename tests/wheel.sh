#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the wheel and imports it from another directory: what is missing from
# the package list shows here and nowhere else.
set -eu
here=$(pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$BIN/python" -m build --wheel --no-isolation --outdir "$work" "$here" \
  >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$BIN/python" -m pip install --quiet --disable-pip-version-check --no-deps \
  --target "$work/site" "$work"/*.whl
cd "$work"
"$BIN/python" -I -c "
import sys
sys.path.insert(0, '$work/site')
import wanspec_jax, wanspec_jax.models, wanspec_jax.worlds, trees, drafters, training
assert wanspec_jax.__file__.startswith('$work'), wanspec_jax.__file__
assert trees.__file__.startswith('$work'), trees.__file__
"
