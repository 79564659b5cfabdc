# SPDX-License-Identifier: Apache-2.0
"""Decodes prompts over a ring: `python -m experiments.decode --config wan4`.

Spawns a ring of stage processes here (or joins a running one, `--cluster`),
decodes each prompt plainly and speculatively over the same emulated links, and
compares tokens, laps, bytes and time. Writes a run directory. The last line is
`identical=k/n tokens_per_lap=… speedup=…`.

`--config NAME` starts from `experiments/configs/NAME.py` (or a file); every
field may then be overridden.
"""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import rich.console
import tyro

from experiments import _arms, _local, _report, _rundir, _setup, _timeline
from experiments._settings import Decode, load_config
from experiments.serve import load as load_stage
from training import Prompt, load_prompts
from wanspec_jax import metrics, models, wire
from wanspec_jax import schedules as sch
from wanspec_jax.links import StageProfile
from wanspec_jax.worlds import (
  Cluster,
  Driver,
  Outcome,
  SessionFault,
  SessionResult,
  SocketRing,
  Span,
  StageShape,
  VirtualRing,
)

_PROFILE_REPEATS = 5
_DEFAULT_DTYPE = "bfloat16"
_DEFAULT_BUCKETS = (8, 16, 32, 64)


class Session:
  """A ring that is up, with what all arms share.

  Attributes:
    settings: the effective configuration.
    cluster: the ring.
    tokenizer: of the model.
    vocab_size: of the model.
    profile: stage times.
    directory: run directory.
  """

  def __init__(
    self,
    settings: Decode,
    cluster: Cluster,
    world: Any,
    profile: StageProfile,
    directory: pathlib.Path,
  ):
    self.settings = settings
    self.cluster = cluster
    self.profile = profile
    self.directory = directory
    self.tokenizer = models.load_tokenizer(cluster.model)
    self.vocab_size = models.load_config(cluster.model).vocab_size
    self._world = world
    self._lap_s = _arms.lap_seconds(cluster, settings.links, profile)

  def lap_s(self, num_rows: int) -> float:
    """Returns the modelled lap of a run of that many rows."""
    return self._lap_s(num_rows)

  async def run(
    self, driver: Driver, requests: Sequence[sch.Request]
  ) -> SessionResult:
    """Runs requests that come all at once."""
    timed = [(0.0, request) for request in requests]
    if isinstance(self._world, SocketRing):
      return await self._world.run(driver, timed)
    return await asyncio.to_thread(self._world.run, driver, timed)

  def driver(
    self,
    speculate: _arms.Speculate,
    *,
    recorded: Sequence[int] | None = None,
    on_emit=None,
  ) -> Driver:
    """Returns a fresh engine and drafter."""
    return _arms.make_driver(
      cluster=self.cluster,
      lap_s=self._lap_s,
      settings=speculate,
      drafter=_arms.make_drafter(
        speculate,
        eos_ids=self.tokenizer.eos_ids,
        vocab_size=self.vocab_size,
        recorded=recorded,
      ),
      on_emit=on_emit,
    )


@contextlib.asynccontextmanager
async def open_session(
  settings: Decode, directory: pathlib.Path, *, max_length: int
):
  """Brings a ring up, profiles it, and yields a `Session`.

  Args:
    settings: what ring.
    directory: gets the cluster file, logs and the profile.
    max_length: longest prompt plus budget; decides which cache sizes are
      compiled beforehand.
  """
  say = rich.console.Console(stderr=True, highlight=False).print
  async with contextlib.AsyncExitStack() as stack:
    if settings.cluster is not None:
      cluster = Cluster.from_toml(settings.cluster)
    else:
      cluster = make_cluster(settings)
    shape = cluster.shape
    hops = settings.links.hops(cluster.num_stages)
    sizes = sizes_needed(shape, max_length + settings.speculate.max_nodes)
    if settings.world == "virtual":
      world, seconds = virtual_ring(settings, cluster, sizes[-1])
      profile = read_profile(settings) or _arms.profile_of(cluster, seconds)
      yield Session(
        settings,
        cluster,
        world(profile),
        profile,
        directory,
      )
      return
    started_s = time.monotonic()
    if settings.cluster is None:
      stack.enter_context(_local.spawn(cluster, directory))
      say(
        f"{cluster.num_stages} stages up in "
        f"{time.monotonic() - started_s:.1f} s"
      )
    ring = await stack.enter_async_context(
      SocketRing(
        cluster,
        model_hash=models.model_hash(cluster.model),
        hops=hops if settings.emulate else None,
      )
    )
    started_s = time.monotonic()
    for num_slots in sizes[:-1]:
      await ring.measure(num_slots=num_slots, repeats=0)
    seconds = await ring.measure(num_slots=sizes[-1], repeats=_PROFILE_REPEATS)
    say(f"compiled and profiled in {time.monotonic() - started_s:.1f} s")
    profile = read_profile(settings) or _arms.profile_of(cluster, seconds)
    (directory / "profile.json").write_text(profile.to_json())
    yield Session(settings, cluster, ring, profile, directory)


def make_cluster(settings: Decode) -> Cluster:
  """Returns the loopback cluster that the settings ask for."""
  ring = settings.ring
  chosen = _setup.read_choice(ring.model)
  dtype = ring.dtype
  if dtype == "auto":
    dtype = chosen.get("dtype", _DEFAULT_DTYPE)
  buckets = ring.row_buckets or tuple(
    chosen.get("row_buckets", _DEFAULT_BUCKETS)
  )
  return _local.local_cluster(
    num_stages=ring.stages,
    model=ring.model,
    dtype=dtype,
    codec=ring.codec,
    shape=StageShape(
      row_buckets=tuple(buckets), slot_buckets=ring.slot_buckets
    ),
    verifier=ring.verifier,
    rollback=ring.rollback,
    peer_deadline_s=ring.peer_deadline_s,
  )


def sizes_needed(shape: StageShape, max_slots: int) -> list[int]:
  """Returns the cache sizes that a text of so many slots passes through."""
  needed = []
  for bucket in shape.slot_buckets:
    needed.append(bucket)
    if bucket >= max_slots:
      break
  return needed


def read_profile(settings: Decode) -> StageProfile | None:
  if settings.profile is None:
    return None
  return StageProfile.from_json(settings.profile.read_text())


def virtual_ring(settings: Decode, cluster: Cluster, num_slots: int):
  """Returns a maker of the virtual ring and its stages' times, if needed."""
  stages = [load_stage(cluster, i) for i in range(cluster.num_stages)]
  seconds = []
  if settings.profile is None:
    for stage in stages:
      times = stage.measure(num_slots=num_slots, repeats=_PROFILE_REPEATS)
      seconds.append([times[b] for b in cluster.shape.row_buckets])

  def make(profile: StageProfile) -> VirtualRing:
    return VirtualRing(
      stages=stages,
      hops=settings.links.hops(cluster.num_stages),
      profile=profile,
    )

  return make, seconds


def read_prompts(settings: Decode) -> tuple[Prompt, ...]:
  """Returns the prompts that the settings name."""
  if settings.text:
    return tuple(
      Prompt(id=str(i), category="given", text=text, turns=(text,))
      for i, text in enumerate(settings.text)
    )
  if settings.prompts is None:
    return _rundir.bundled_prompts(
      per_category=settings.per_category, limit=settings.limit
    )
  return load_prompts(
    settings.prompts,
    per_category=settings.per_category,
    limit=settings.limit,
  )


def make_requests(
  settings: Decode, prompts: Sequence[Prompt], tokenizer: Any
) -> list[sch.Request]:
  """Returns one request per prompt, chat template applied."""
  return [
    _arms.make_request(
      tokenizer.apply_chat_template([{"role": "user", "content": p.text}]),
      max_new_tokens=settings.max_new_tokens,
      sampling=dataclasses.replace(
        settings.sampling, seed=settings.sampling.seed + i
      ),
      tokenizer=tokenizer,
      stop_strings=settings.stop,
    )
    for i, p in enumerate(prompts)
  ]


async def run_arm(
  session: Session,
  name: str,
  speculate: _arms.Speculate,
  requests: Sequence[sch.Request],
  *,
  recorded: Sequence[Outcome] | None = None,
  printer: Any = None,
) -> tuple[_report.Arm, list[Span]]:
  """Decodes all requests, `concurrent` at a time, and returns the arm."""
  outcomes: list[Outcome] = []
  counter = wire.ByteCounter()
  spans: list[Span] = []
  shift_s = 0.0
  step = session.settings.concurrent
  for low in range(0, len(requests), step):
    batch = requests[low : low + step]
    replayed = None
    if speculate.drafter == "synthetic" and recorded is not None:
      replayed = recorded[low].tokens
    if printer is not None:
      printer.begin(name, low)
    driver = session.driver(
      speculate,
      recorded=replayed,
      on_emit=None if printer is None else printer.emit,
    )
    result = await session.run(driver, batch)
    outcomes += [result.outcomes[i] for i in range(len(batch))]
    counter = counter.merge(result.bytes)
    spans += [
      s._replace(start_s=s.start_s + shift_s, end_s=s.end_s + shift_s)
      for s in result.spans
    ]
    shift_s = max([shift_s, *(s.end_s for s in spans)])
    if printer is not None:
      printer.end()
  arm = _report.Arm(
    name=name,
    world=session.settings.world,
    outcomes=outcomes,
    bytes=counter,
  )
  return arm, spans


class Printer:
  """Streams text; with several prompts at once only says how far they are."""

  def __init__(self, tokenizer: Any, prompts: Sequence[Prompt], stream: bool):
    self._tokenizer = tokenizer
    self._prompts = prompts
    self._stream = stream
    self._console = rich.console.Console(highlight=False, soft_wrap=True)
    self._texts: dict[int, Any] = {}

  def begin(self, arm: str, first: int) -> None:
    self._texts = {}
    prompt = self._prompts[first]
    left = f"{first + 1}/{len(self._prompts)}"
    self._console.print(
      f"[bold]{arm}[/bold] {left} {prompt.category} {prompt.id}",
      end="\n" if self._stream else " ",
    )

  def emit(self, sequence: int, tokens: Sequence[int]) -> None:
    if not self._stream or sequence:
      return
    if sequence not in self._texts:
      self._texts[sequence] = self._tokenizer.stream()
    text = self._texts[sequence].push(tokens)
    self._console.print(text, end="", markup=False, style="dim")

  def end(self) -> None:
    self._console.print("")


def ring_identity(session: Session) -> dict[str, Any]:
  """Returns all that must be equal for a recorded plain decoding to count."""
  settings, cluster = session.settings, session.cluster
  return {
    "model": models.model_hash(cluster.model),
    "cluster": {
      "dtype": cluster.dtype,
      "codec": cluster.codec,
      "verifier": cluster.verifier,
      "rollback": cluster.rollback,
      "row_buckets": list(cluster.shape.row_buckets),
      "slot_buckets": list(cluster.shape.slot_buckets),
      "layers": [list(stage.layers) for stage in cluster.stages],
    },
    "links": dataclasses.asdict(settings.links) if settings.emulate else None,
    "sampling": dataclasses.asdict(settings.sampling),
    "max_new_tokens": settings.max_new_tokens,
    "concurrent": settings.concurrent,
    "stop": list(settings.stop),
    "world": settings.world,
    "versions": {
      k: v for k, v in _rundir.versions().items() if k in ("jax", "jaxlib")
    },
  }


def recorded_plain(
  path: pathlib.Path,
  identity: dict[str, Any],
  requests: Sequence[sch.Request],
) -> _report.Arm:
  """Returns the plain arm that an earlier run wrote.

  Raises:
    ValueError: naming what differs.
  """
  file = path / "plain.json"
  try:
    data = json.loads(file.read_text())
  except OSError as error:
    raise ValueError(f"plain_from: {file} cannot be read ({error})") from error
  theirs = data["identity"]
  for field in identity:
    if theirs.get(field) != identity[field]:
      raise ValueError(
        f"plain_from: {field} was {theirs.get(field)!r} there and is "
        f"{identity[field]!r} here"
      )
  known = {tuple(o["prompt"]): o for o in data["outcomes"]}
  outcomes = []
  for i, request in enumerate(requests):
    if request.prompt not in known:
      raise ValueError(f"plain_from: prompt {i} was not decoded there")
    outcomes.append(_outcome(known[request.prompt]))
  return _report.Arm(
    name="plain (recorded)",
    world=identity["world"],
    outcomes=outcomes,
    bytes=wire.ByteCounter.from_dict(data["bytes"]),
  )


def _outcome(fields: dict[str, Any]) -> Outcome:
  """Returns an outcome from its JSON form."""
  rounds = tuple(metrics.RoundRecord(**r) for r in fields["rounds"])
  return Outcome(
    **fields | {"prompt": tuple(fields["prompt"]), "rounds": rounds}
  )


async def decode(settings: Decode) -> dict[str, Any]:
  """Runs the experiment and returns the figures of the last line."""
  directory = settings.out or _rundir.new_run_dir("decode")
  directory.mkdir(parents=True, exist_ok=True)
  prompts = read_prompts(settings)
  model = settings.ring.model
  if settings.cluster is not None:
    model = Cluster.from_toml(settings.cluster).model
  tokenizer = models.load_tokenizer(model)
  requests = make_requests(settings, prompts, tokenizer)
  longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
  async with open_session(
    settings, directory, max_length=longest * settings.concurrent
  ) as session:
    printer = Printer(tokenizer, prompts, settings.stream)
    arms: list[_report.Arm] = []
    spans: dict[str, list[Span]] = {}
    identity = ring_identity(session)
    plain = None
    if settings.plain_from is not None:
      plain = recorded_plain(settings.plain_from, identity, requests)
      arms.append(plain)
    elif settings.plain:
      plain, spans["plain"] = await run_arm(
        session,
        "plain",
        _arms.Speculate(drafter="none", max_nodes=0),
        requests,
        printer=printer,
      )
      arms.append(plain)
      _rundir.write_json(
        directory / "plain.json",
        {
          "identity": identity,
          "outcomes": [dataclasses.asdict(o) for o in plain.outcomes],
          "bytes": plain.bytes.as_dict(),
        },
      )
    speculative, spans["speculative"] = await run_arm(
      session,
      "speculative",
      settings.speculate,
      requests,
      recorded=None if plain is None else plain.outcomes,
      printer=printer,
    )
    arms.append(speculative)
    for name, value in spans.items():
      _timeline.write_perfetto(value, directory / f"trace-{name}.json")
    _timeline.draw_timeline(
      spans["speculative"],
      directory / "timeline.png",
      title=f"{settings.schedule}, {settings.speculate.drafter}",
      world=settings.world,
    )
    _report.show(
      _report.per_prompt_table(arms, [f"{p.category} {p.id}" for p in prompts]),
      _report.comparison_table(arms),
    )
    figures = figures_of(plain, speculative)
    _rundir.write_json(
      directory / "result.json",
      {
        "config": _rundir.config_dict(settings),
        "cluster": dataclasses.asdict(session.cluster),
        "versions": _rundir.versions(),
        "profile": json.loads(session.profile.to_json()),
        "figures": figures,
        "arms": {
          arm.name: _report.arm_figures(arm, plain) | {"outcomes": arm.outcomes}
          for arm in arms
        },
      },
    )
    print(f"run directory: {directory}")
    return figures


def figures_of(
  plain: _report.Arm | None, speculative: _report.Arm
) -> dict[str, Any]:
  """Returns the last line's figures."""
  rounds = [r for o in speculative.outcomes for r in o.rounds]
  figures: dict[str, Any] = {"tokens_per_lap": metrics.tokens_per_lap(rounds)}
  if plain is None:
    return figures
  speedup = speculative.speedup(plain)
  return {
    "identical": f"{speedup.num_identical}/{speedup.num_prompts}",
    **figures,
    "speedup": speedup.ratio,
  }


def main(argv: Sequence[str] | None = None) -> None:
  argv = list(sys.argv[1:] if argv is None else argv)
  try:
    default = Decode()
    if "--config" in argv:
      at = argv.index("--config")
      if at + 1 == len(argv):
        raise ValueError("--config: needs the name of a configuration")
      default = load_config(argv[at + 1])
      del argv[at : at + 2]
    settings = tyro.cli(
      tyro.conf.OmitArgPrefixes[Decode],
      args=argv,
      default=default,
      description=__doc__,
    )
    _setup.use_compilation_cache()
    figures = asyncio.run(decode(settings))
  except (ValueError, RuntimeError, SessionFault) as error:
    sys.exit(f"experiments.decode: {error}")
  print(_rundir.figures_line(**figures))


if __name__ == "__main__":
  main()
