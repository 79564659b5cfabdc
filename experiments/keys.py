# SPDX-License-Identifier: Apache-2.0
"""Makes the certificates that the hosts of a cluster know each other by.

  python -m experiments.keys --dir keys \\
    --hosts coordinator=192.0.2.1 stage-0=192.0.2.2,gpu-a.example stage-1=::1

creates the cluster's authority unless `--dir` holds one, and issues one
certificate per name. Copy to each host `ca.pem` and its own `NAME.pem` and
`NAME.key`; keep `ca.key` where certificates are issued. Takes a second.
"""

import dataclasses
import pathlib
import sys

import tyro

from wanspec_jax import wire


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Makes the certificates that the hosts of a cluster know each other by.

  Attributes:
    dir: where keys and certificates go; made if need be.
    hosts: one `NAME=HOST[,HOST…]` per role.
    days: validity of the certificates issued.
  """

  dir: pathlib.Path
  hosts: tuple[str, ...]
  days: int = 365

  def __post_init__(self):
    if not self.hosts:
      raise ValueError("hosts = (): must name at least one role")
    if self.days <= 0:
      raise ValueError(f"days = {self.days}: must be > 0")
    names = [split_entry(entry)[0] for entry in self.hosts]
    for name in names:
      if names.count(name) > 1:
        raise ValueError(f"hosts: {name!r} is listed twice")


def split_entry(entry: str) -> tuple[str, tuple[str, ...]]:
  """Returns the name and the hosts of `NAME=HOST[,HOST…]`.

  Raises:
    ValueError: if the entry has another form.
  """
  name, equals, hosts = entry.partition("=")
  parts = tuple(hosts.split(","))
  if not name or not equals or not all(parts):
    raise ValueError(f"hosts: {entry!r} is not of the form NAME=HOST[,HOST…]")
  return name, parts


def main(config: Config) -> list[pathlib.Path]:
  """Makes what is missing, says so, and returns the certificates' paths."""
  made = []
  if (config.dir / "ca.pem").exists():
    print(f"authority: {config.dir / 'ca.pem'} (kept)")
  else:
    made.append(wire.create_authority(config.dir))
    print(f"authority: {made[0]} (new; {config.dir / 'ca.key'} is secret)")
  for entry in config.hosts:
    name, hosts = split_entry(entry)
    made.append(wire.issue(config.dir, name, hosts, days=config.days))
    print(f"{name}: {made[-1]} for {', '.join(hosts)}, {config.days} days")
  return made


if __name__ == "__main__":
  try:
    main(tyro.cli(Config))
  except (ValueError, OSError) as error:
    sys.exit(f"experiments.keys: {error}")
