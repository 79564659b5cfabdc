# SPDX-License-Identifier: Apache-2.0
"""Clusters on this host, and stages of a cluster loaded into this process."""

import contextlib
import socket
from collections.abc import Sequence

import jax.numpy as jnp

from wanspec_jax import codecs, models, verify
from wanspec_jax.rollback import mask_rollback
from wanspec_jax.worlds._cluster import Cluster, StageHost, Standby
from wanspec_jax.worlds._stage import Stage, StageShape


def free_ports(count: int) -> list[int]:
  """Returns ports of the loopback interface that nobody listens on now."""
  with contextlib.ExitStack() as stack:
    sockets = [
      stack.enter_context(socket.create_server(("127.0.0.1", 0)))
      for _ in range(count)
    ]
    return [s.getsockname()[1] for s in sockets]


def local_cluster(
  *,
  num_stages: int,
  model: str,
  dtype: str,
  codec: str,
  shape: StageShape,
  cuts: Sequence[tuple[int, int]] | None = None,
  standbys: Sequence[int] = (),
  **settings,
) -> Cluster:
  """Returns a cluster of `num_stages` stages on loopback, layers spread evenly.

  Args:
    num_stages: `P`.
    model: as for `resolve_model`.
    dtype: of the weights.
    codec: of the links between stages.
    shape: compiled sizes.
    cuts: `(first_layer, num_layers)` of each stage, to cut otherwise.
    standbys: stages, by index, that have a standby each time they are named.
    **settings: further fields of `Cluster`.
  """
  config = models.load_config(model)
  if num_stages > config.num_layers:
    raise ValueError(
      f"stages = {num_stages}: {model} has {config.num_layers} layers"
    )
  cuts = cuts or models.even_cuts(config.num_layers, num_stages)
  ports = free_ports(num_stages + len(standbys))
  return Cluster(
    stages=tuple(
      StageHost(
        name=f"stage-{i}", host="127.0.0.1", port=port, layers=tuple(cut)
      )
      for i, (port, cut) in enumerate(
        zip(ports[:num_stages], cuts, strict=True)
      )
    ),
    standbys=tuple(
      Standby(
        name=f"standby-{i}",
        host="127.0.0.1",
        port=port,
        stage=f"stage-{stage}",
      )
      for i, (stage, port) in enumerate(
        zip(standbys, ports[num_stages:], strict=True)
      )
    ),
    model=model,
    dtype=dtype,
    codec=codec,
    shape=shape,
    **settings,
  )


def verifier_of(cluster: Cluster) -> verify.Verifier:
  """Returns the rule by which the ring's last stage draws."""
  return {"race": verify.race, "greedy": verify.greedy}[cluster.verifier]()


def load_stage(cluster: Cluster, index: int) -> Stage:
  """Returns a stage with its own layers loaded, nothing compiled yet.

  Args:
    cluster: the ring.
    index: position of the stage.

  Raises:
    ValueError: the cluster's layers are not those of its model.
  """
  config = models.load_config(cluster.model)
  total = sum(host.layers[1] for host in cluster.stages)
  if total != config.num_layers:
    raise ValueError(
      f"[[stage]] layers: {total} in all, {cluster.model} has "
      f"{config.num_layers}"
    )
  first, count = cluster.stages[index].layers
  params = models.load_stage(
    cluster.model,
    config,
    first_layer=first,
    num_layers=count,
    dtype=jnp.dtype(cluster.dtype),
  )
  return Stage(
    config=config,
    params=params,
    shape=cluster.shape,
    codec_in=None if params.embed is not None else codecs.parse(cluster.codec),
    codec_out=None if params.head is not None else codecs.parse(cluster.codec),
    rollback=mask_rollback(),
    verifier=verifier_of(cluster),
  )
