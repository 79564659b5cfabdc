# SPDX-License-Identifier: Apache-2.0
"""A ring without time: any interleaving that channels in order allow."""

import collections
import dataclasses
import math
import random as random_lib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from wanspec_jax import schedules as sch
from wanspec_jax.base import Drafter, Nodes
from wanspec_jax.messages import Sampling
from wanspec_jax.worlds import Driver, ReplayStage

VOCAB = 4
# Tokens as bytes: some empty, two that are halves of one character.
PIECES = (b"a", b"ab", b"", "é".encode()[:1], "é".encode()[1:], b"b")

SEEDS = st.integers(0, 2**32).map(random_lib.Random)


def examples(count):
  """Returns the settings of a property: so many examples, always the same."""
  return settings(derandomize=True, deadline=None, max_examples=count)


def random_texts(random, count, length, vocab=VOCAB):
  """Returns `{seed: random text}` for seeds from 0 on."""
  return {
    s: [random.randrange(vocab) for _ in range(length)] for s in range(count)
  }


def text_of(tokens):
  """Returns the text of tokens, as a byte-level tokenizer would."""
  return b"".join(PIECES[t] for t in tokens).decode(errors="replace")


def plain(text, request, capacity):
  """Returns what plain decoding emits and why it ends, token by token."""
  prompt = len(request.prompt)
  budget = min(request.max_new_tokens, capacity - prompt)
  out = []
  for token in text[prompt : prompt + budget]:
    out.append(token)
    if token in request.stop.ids:
      return out, "stop"
    if any(s in text_of(out) for s in request.stop.strings):
      return out, "stop_string"
  return out, "length"


def assert_plain(driver, requests, texts, capacity):
  """Every request has the text and the end of plain decoding."""
  for s, request in enumerate(requests):
    tokens, reason = plain(texts[s], request, capacity)
    outcome = driver.outcomes[s]
    assert (outcome.tokens, outcome.reason) == (tokens, reason)


def nodes_of(tokens, parents, log_q=-0.5):
  """Returns drafted nodes; `log_q` is one number for all or one for each."""
  return Nodes(
    np.array(tokens, np.int32),
    np.array(parents, np.int32),
    np.broadcast_to(log_q, len(tokens)).astype(np.float32),
  )


def drafted(draft, nodes, *, time_s=0.0):
  """Returns the event that answers a `Draft`."""
  return sch.Drafted(
    time_s=time_s,
    sequence=draft.sequence,
    ticket=draft.ticket,
    anchors=draft.anchors,
    nodes=nodes,
  )


def drafter_of(texts, *, right, size, random, log_q=None, vocab=VOCAB):
  """Returns a drafter that is right with some probability, else garbage.

  Trees of random shape with nodes that repeat each other; more nodes than it
  was asked for, now and then. Knows its text by the request's seed.

  Args:
    texts: `{seed: whole text}`.
    right: probability that a node below the true path is the true token.
    size: `(budget) -> nodes to draft`.
    random: a `random.Random`.
    log_q: `() -> log q`; by default uniform in [-2, 0].
    vocab: garbage is drawn from these many tokens.
  """
  draw = log_q or (lambda: -2 * random.random())

  def init(params, prompt, request_key):
    assert tuple(prompt) == tuple(texts[request_key][: len(prompt)])
    return {"text": texts[request_key], "done": len(prompt)}

  def expand(state, anchors, budget, levels=None):
    text, done = state["text"], state["done"]
    rows = [tuple(anchor.path) for anchor in anchors]
    tokens, parents = [], []
    for _ in range(size(budget)):
      parents.append(
        len(rows) - 1 if random.random() < 0.5 else random.randrange(len(rows))
      )
      path = rows[parents[-1]]
      token = random.randrange(vocab)
      at = done + len(path)
      true_path = tuple(text[done:at]) == path and at < len(text)
      if true_path and random.random() < right:
        token = text[at]
      tokens.append(token)
      rows.append((*path, token))
    return state, nodes_of(tokens, parents, [draw() for _ in tokens])

  def observe(state, tokens, features=None):
    new = state["done"] + len(tokens)
    assert tuple(state["text"][state["done"] : new]) == tuple(tokens)
    return {"text": state["text"], "done": new}

  return Drafter("random", init, expand, lambda state, root: state, observe)


def chain_of(texts, depth):
  """Returns the drafter that is always right, `depth` tokens at a time."""

  def expand(state, anchors, budget, levels=None):
    text, done = texts[state[0]], state[1]
    assert len(anchors) == 1
    done += len(anchors[0].path)
    ahead = text[done : done + min(depth, budget)]
    return state, nodes_of(ahead, range(len(ahead)), math.log(0.9))

  return Drafter(
    "chain",
    lambda params, prompt, key: (key, len(prompt)),
    expand,
    lambda state, root: state,
    lambda state, tokens, features=None: (state[0], state[1] + len(tokens)),
  )


def pipelined(random, *, max_in_flight, max_nodes):
  """Returns a policy that does anything allowed: it grows the tree anywhere,
  launches any subset of it in several runs, and hedges at random."""

  def decide(spec, pipe, time_s):
    if not spec.drafting and spec.max_new_nodes and random.random() < 0.5:
      known = sorted(spec.nodes)
      picks = random.sample(known, min(len(known), random.randint(1, 2)))
      return sch.Grow(
        anchors=tuple(spec.anchor(node) for node in picks),
        budget=random.randint(1, max_nodes),
      )
    if spec.in_flight >= max_in_flight:
      return None
    launched = {n.id for n in spec.nodes.values() if n.run is not None}
    launched.add(spec.root)
    ids = []
    for node in spec.unlaunched():
      if len(ids) < min(spec.max_new_nodes, max_nodes) and (
        node.parent in launched and random.random() < 0.6
      ):
        ids.append(node.id)
        launched.add(node.id)
    if spec.root_launched and not ids:
      return None
    return sch.Send(ids=tuple(ids))

  return sch.Policy(
    name="pipelined", decide=decide, max_in_flight=max_in_flight
  )


def costs(max_rows):
  return sch.Costs.constant(1.0, max_rows=max_rows)


class Recorder:
  """A `ReplayStage` that logs how many slots it uses after each run."""

  def __init__(self, stage):
    self.stage = stage
    self.used = {}
    self.rows = {}

  def reset(self):
    self.stage.reset()

  def cancel(self, cancel):
    self.stage.cancel(cancel)

  def process(self, run, payload=None):
    out = self.stage.process(run, payload)
    slots = self.stage._slots
    self.used[run.run_id] = int(slots.used.sum())
    self.rows[run.run_id] = run
    return out


def ring(texts, *, num_stages, capacity):
  """Returns recorded stages that replay `texts`."""
  stages = [
    ReplayStage(capacity=capacity, row_bytes=4) for _ in range(num_stages - 1)
  ]
  stages.append(ReplayStage(capacity=capacity, texts=texts))
  return [Recorder(stage) for stage in stages]


def slots_by_engine(engine):
  """Returns the slots that stages hold once all that was sent has come."""
  used = 0
  for entry in engine.sequences.values():
    spec = entry.spec
    committed = len(spec.tokens) - (not spec.root_launched)
    if entry.request and spec.sequence in engine.opens:
      continue  # nothing of it was sent yet
    used += committed + spec.num_launched + spec.dead_held
  return used


@dataclasses.dataclass
class Session:
  """What a random interleaving did."""

  driver: Driver
  stages: list
  expected_used: dict
  emitted: dict
  cancelled: bool = False


def play(driver, stages, requests, random, *, aborts=()):
  """Runs requests to their end, the next thing to happen chosen at random.

  Frames keep their order on each hop; nothing else is fixed: drafts come before
  or after verdicts, stages may lag by any number of runs.

  Args:
    driver: a fresh engine with its drafter.
    stages: of `ring`.
    requests: in the order of their sequence numbers.
    random: a `random.Random`.
    aborts: sequences whose client goes away at some moment.
  """
  hops = [collections.deque() for _ in range(len(stages) + 1)]
  waiting = collections.deque(enumerate(requests))
  drafts, back, aborts = [], [], list(aborts)
  session = Session(driver, stages, {}, collections.defaultdict(list))
  driver._on_emit = lambda s, tokens: session.emitted[s].extend(tokens)

  def hear(event):
    work = driver.handle(event)
    hops[0].extend((run, None) for run in work.runs)
    drafts.extend(driver.draft(action, 0.0) for action in work.drafts)
    back.extend((len(stages), cancel) for cancel in work.cancels)
    session.cancelled |= bool(work.cancels)
    if work.runs:
      session.expected_used[work.runs[-1].run_id] = slots_by_engine(
        driver.engine
      )

  for _ in range(100_000):
    moves = [("hop", i) for i, hop in enumerate(hops) if hop]
    moves += [("draft", i) for i in range(len(drafts))]
    moves += [("cancel", i) for i in range(len(back))]
    moves += [("submit", 0)] if waiting else []
    known = [s for s in aborts if s < len(requests) - len(waiting)]
    moves += [("abort", s) for s in known if random.random() < 0.1]
    if not moves:
      if not known:
        break
      moves = [("abort", s) for s in known]
    match random.choice(moves):
      case ("submit", _):
        sequence, request = waiting.popleft()
        hear(sch.Submitted(time_s=0.0, sequence=sequence, request=request))
      case ("draft", i):
        hear(drafts.pop(i))
      case ("abort", s):
        aborts.remove(s)
        hear(sch.Aborted(time_s=0.0, sequence=s))
      case ("cancel", i):
        place, cancel = back.pop(i)
        stages[place - 1].cancel(cancel)
        if place > 1:
          back.append((place - 1, cancel))
      case ("hop", i) if i < len(stages):
        out = stages[i].process(*hops[i].popleft())
        hops[i + 1].append((out.message, out.payload))
      case ("hop", i):
        hear(sch.Arrived(time_s=0.0, returned=hops[i].popleft()[0]))
  else:
    raise AssertionError("the session does not end")
  return session


def request_of(text, prompt, budget, *, seed, stop=None):
  return sch.Request(
    prompt=tuple(text[:prompt]),
    max_new_tokens=budget,
    sampling=Sampling(seed=seed),
    stop=stop or sch.Stop(),
  )


def check_any_interleaving(policy, seed, *, max_rows):
  """Decodes random texts in any order of events; compares with plain decoding.

  Args:
    policy: a `Policy`.
    seed: of everything that is random.
    max_rows: choices of how many rows a run may have.
  """
  random = random_lib.Random(seed)
  count = random.randint(1, 3)
  capacity = random.choice([24, 60, 150])
  texts = random_texts(random, count, capacity + 12)
  requests = [
    request_of(texts[s], random.randint(1, 6), random.randint(1, 18), seed=s)
    for s in range(count)
  ]
  engine = sch.init(
    policy,
    costs(random.choice(max_rows)),
    capacity=capacity,
    prefill_rows=4,
  )
  drafter = drafter_of(
    texts,
    right=random.choice([0.0, 0.6, 1.0]),
    size=lambda budget: random.randint(0, budget + 1),
    random=random,
  )
  stages = ring(texts, num_stages=random.randint(1, 3), capacity=capacity)
  session = play(Driver(engine, drafter), stages, requests, random)
  assert_plain(session.driver, requests, texts, capacity)
  for stage in stages:
    assert int(stage.stage._slots.used.sum()) == 0
