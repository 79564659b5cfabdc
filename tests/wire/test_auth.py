# SPDX-License-Identifier: Apache-2.0
import asyncio
import contextlib
import re
import stat

import pytest
from cryptography import x509

from experiments import keys
from tests.wire.examples import CHAIN
from wanspec_jax import wire

RUN = wire.encode_run(CHAIN, bytes(300_000))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
  directory = tmp_path_factory.mktemp("keys") / "cluster"
  wire.create_authority(directory)
  wire.issue(directory, "coordinator", ["127.0.0.1"])
  wire.issue(directory, "stage-1", ["127.0.0.1", "localhost", "127.0.0.1"])
  # A host that is called like another role must not pass for it.
  wire.issue(directory, "stage-2", ["::1", "stage-1", "coordinator"])
  return directory


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
  directory = tmp_path_factory.mktemp("keys") / "strangers"
  wire.create_authority(directory)
  wire.issue(directory, "coordinator", ["127.0.0.1"])
  wire.issue(directory, "stage-1", ["127.0.0.1"])
  return directory


def talk(server, client, *, peer="stage-1", name="coordinator"):
  """Returns (what the client met, what the listener noted)."""

  async def handler(channel):
    await wire.answer(channel, lambda hello: None)
    await channel.send(wire.encode_run(CHAIN, (await channel.recv()).body))

  async def main():
    met = None
    async with await wire.listen(handler, ssl_context=server) as listener:
      try:
        async with await wire.connect(
          "127.0.0.1",
          listener.port,
          peer=peer,
          ssl_context=client,
          deadline_s=5,
        ) as channel:
          await wire.offer(channel, {"name": name}, deadline_s=5)
          await channel.send(RUN)
          met = await channel.recv(deadline_s=5)
      except wire.WireError as error:
        met = error
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2):
          while isinstance(met, wire.WireError) and not listener.refusals:
            await asyncio.sleep(0.01)
      return met, " | ".join(listener.refusals)

  return asyncio.run(main())


def test_members_talk(cluster):
  met, noted = talk(
    wire.server_context(cluster, "stage-1"),
    wire.client_context(cluster, "coordinator"),
  )
  assert isinstance(met, wire.Frame), met
  assert len(wire.decode_run(met.body)[1]) > 300_000
  assert "refused" not in noted


def test_unknown_client_is_refused(cluster, strangers):
  client = wire.client_context(strangers, "coordinator")
  client.load_verify_locations(cluster / "ca.pem")
  met, noted = talk(wire.server_context(cluster, "stage-1"), client)
  assert isinstance(met, wire.PeerLost)
  assert "stage-1: lost: certificate not accepted" in str(met)
  assert re.search("certificate not accepted: .*(issuer|self.signed)", noted)


def test_unknown_server_is_refused(cluster, strangers):
  met, noted = talk(
    wire.server_context(strangers, "stage-1"),
    wire.client_context(cluster, "coordinator"),
  )
  assert isinstance(met, wire.PeerRefused)
  assert "certificate not accepted by this side" in met.reason
  assert "handshake failed" in noted


@pytest.mark.parametrize("impostor", ["coordinator", "stage-2"])
def test_server_of_another_name_is_refused(cluster, impostor):
  met, noted = talk(
    wire.server_context(cluster, impostor),
    wire.client_context(cluster, "coordinator"),
  )
  assert isinstance(met, wire.PeerRefused)
  assert met.peer == "stage-1"
  # A certificate without the name fails in TLS, one that only has it as the
  # name of a host fails after it; both sides learn why.
  assert "not" in met.reason
  assert "stage-1" in met.reason
  assert re.search("certificate|handshake", noted)


def test_client_of_another_name_is_refused(cluster):
  met, noted = talk(
    wire.server_context(cluster, "stage-1"),
    wire.client_context(cluster, "stage-2"),
  )
  reason = "name 'coordinator' is not that of the certificate, 'stage-2'"
  assert isinstance(met, wire.PeerRefused)
  assert met.reason == reason
  assert reason in noted


def test_client_without_certificate_is_refused(cluster):
  client = wire.client_context(cluster, "coordinator")
  bare = type(client)(client.protocol)
  bare.load_verify_locations(cluster / "ca.pem")
  met, noted = talk(wire.server_context(cluster, "stage-1"), bare)
  assert isinstance(met, wire.PeerLost)
  assert "certificate not accepted" in met.cause
  assert "did not return a certificate" in noted


def test_plain_and_secure_do_not_mix(cluster):
  met, noted = talk(wire.server_context(cluster, "stage-1"), None)
  assert isinstance(met, wire.PeerLost)
  assert "handshake failed" in noted
  met, noted = talk(None, wire.client_context(cluster, "coordinator"))
  assert isinstance(met, wire.WireError)
  assert "bad magic byte 0x16 (a TLS peer?)" in noted


def test_keys_are_private_and_certificates_say_who(cluster):
  for path in cluster.glob("*.key"):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert stat.S_IMODE(cluster.stat().st_mode) == 0o700
  assert (cluster / ".gitignore").read_text() == "*\n"
  data = (cluster / "stage-1.pem").read_bytes()
  certificate = x509.load_pem_x509_certificate(data)
  names = certificate.extensions.get_extension_for_class(
    x509.SubjectAlternativeName
  ).value
  assert certificate.subject.rfc4514_string() == "CN=stage-1"
  assert names.get_values_for_type(x509.DNSName) == ["stage-1", "localhost"]
  assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == [
    "127.0.0.1"
  ]


def test_issuing_is_checked(cluster, tmp_path):
  with pytest.raises(FileExistsError, match="holds an authority already"):
    wire.create_authority(cluster)
  with pytest.raises(FileNotFoundError):
    wire.issue(tmp_path, "stage-1")
  for name in ("", "Stage", "a.b", "../x", "*", "ca", "-a"):
    with pytest.raises(ValueError, match="must be a DNS label"):
      wire.issue(cluster, name)
  with pytest.raises(ValueError, match="is no DNS name"):
    wire.issue(cluster, "stage-9", ["a b"])
  with pytest.raises(ValueError, match="days = 0"):
    wire.issue(cluster, "stage-9", days=0)
  with pytest.raises(FileNotFoundError, match=r"stage-9\.pem"):
    wire.server_context(cluster, "stage-9")


def test_entry_point(tmp_path, capsys):
  directory = tmp_path / "keys"
  hosts = ("coordinator=127.0.0.1", "stage-0=a.example,::1")
  made = keys.main(keys.Config(dir=directory, hosts=hosts))
  assert [path.name for path in made] == [
    "ca.pem",
    "coordinator.pem",
    "stage-0.pem",
  ]
  authority = (directory / "ca.pem").read_bytes()
  keys.main(keys.Config(dir=directory, hosts=("stage-1=127.0.0.1",)))
  assert (directory / "ca.pem").read_bytes() == authority
  assert "(kept)" in capsys.readouterr().out
  wire.client_context(directory, "stage-1")


@pytest.mark.parametrize(
  ("hosts", "message"),
  [
    ((), "must name at least one role"),
    (("stage-0",), "'stage-0' is not of the form"),
    (("=1.2.3.4",), "is not of the form"),
    (("a=x,",), "is not of the form"),
    (("a=x", "a=y"), "'a' is listed twice"),
  ],
)
def test_bad_entries_are_named(tmp_path, hosts, message):
  with pytest.raises(ValueError, match=message):
    keys.Config(dir=tmp_path, hosts=hosts)
