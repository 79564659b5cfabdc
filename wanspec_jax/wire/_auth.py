# SPDX-License-Identifier: Apache-2.0
"""A cluster's own certificate authority, and mutual TLS 1.3 between its hosts.

Both sides of a channel show a certificate that the authority signed. The
client also checks that the server's bears the name of the peer it wanted, such
as `"stage-1"`; a server learns the client's name from the channel and compares
it with that of the handshake. Hosts and addresses are in the certificates for
other tools; the common name alone decides here, so hosts may move, and a host
that happens to be called like another role gains nothing.

A directory of keys holds `ca.pem` and, per name, `NAME.pem` and `NAME.key`.
Only whoever issues certificates needs `ca.key`.
"""

import datetime
import ipaddress
import os
import pathlib
import re
import ssl
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_NAME = "wanspec cluster authority"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_CLOCK_SLACK = datetime.timedelta(hours=1)


def _write(path: pathlib.Path, data: bytes, mode: int) -> None:
  """Replaces a file in one step; it never exists with a wider mode."""
  partial = path.with_name(f"{path.name}.partial")
  partial.unlink(missing_ok=True)
  flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
  with os.fdopen(os.open(partial, flags, mode), "wb") as file:
    file.write(data)
  partial.replace(path)


def _write_key(path: pathlib.Path, key: ec.EllipticCurvePrivateKey) -> None:
  data = key.private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.NoEncryption(),
  )
  _write(path, data, 0o600)


def _common_name(name: str) -> x509.Name:
  return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, authority: bool) -> x509.KeyUsage:
  return x509.KeyUsage(
    digital_signature=not authority,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=authority,
    crl_sign=authority,
    encipher_only=False,
    decipher_only=False,
  )


def _builder(
  subject: x509.Name,
  issuer: x509.Name,
  key: ec.EllipticCurvePublicKey,
  days: int,
) -> x509.CertificateBuilder:
  now = datetime.datetime.now(datetime.UTC)
  return (
    x509.CertificateBuilder()
    .subject_name(subject)
    .issuer_name(issuer)
    .public_key(key)
    .serial_number(x509.random_serial_number())
    .not_valid_before(now - _CLOCK_SLACK)
    .not_valid_after(now + datetime.timedelta(days=days))
    .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
  )


def create_authority(
  directory: str | os.PathLike[str], *, days: int = 3650
) -> pathlib.Path:
  """Creates `ca.pem` and `ca.key` (ECDSA P-256) and returns the former's path.

  The directory is made with mode 0700 and told to git as ignored.

  Raises:
    FileExistsError: if there is an authority already.
    ValueError: if `days` is not positive.
  """
  if days <= 0:
    raise ValueError(f"days = {days}: must be > 0")
  root = pathlib.Path(directory)
  root.mkdir(mode=0o700, parents=True, exist_ok=True)
  path = root / "ca.pem"
  if path.exists() or (root / "ca.key").exists():
    raise FileExistsError(f"{root}: holds an authority already")
  key = ec.generate_private_key(ec.SECP256R1())
  name = _common_name(AUTHORITY_NAME)
  certificate = (
    _builder(name, name, key.public_key(), days)
    .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    .add_extension(_key_usage(authority=True), True)
    .sign(key, hashes.SHA256())
  )
  _write(root / ".gitignore", b"*\n", 0o644)
  _write_key(root / "ca.key", key)
  _write(path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
  return path


def _alternative_name(host: str) -> x509.GeneralName:
  try:
    return x509.IPAddress(ipaddress.ip_address(host))
  except ValueError:
    return x509.DNSName(host)


def issue(
  directory: str | os.PathLike[str],
  name: str,
  hosts: Sequence[str] = (),
  *,
  days: int = 365,
) -> pathlib.Path:
  """Issues `NAME.pem` and `NAME.key` and returns the former's path.

  Args:
    directory: holds the authority.
    name: of the stage or other role; the common name and a DNS name of the
      certificate. An older certificate of that name is replaced.
    hosts: DNS names and IP addresses that the role is reached at.
    days: validity.

  Raises:
    FileNotFoundError: if the directory holds no authority.
    ValueError: if `name` is not a DNS label, a host is not a DNS name or an
      address, or `days` is not positive.
  """
  if name == "ca" or not _NAME.fullmatch(name):
    raise ValueError(
      f"name = {name!r}: must be a DNS label (a-z, 0-9, inner hyphens) but 'ca'"
    )
  for host in hosts:
    if not re.fullmatch(r"[A-Za-z0-9.:-]+", host):
      raise ValueError(f"hosts: {host!r} is no DNS name or IP address")
  if days <= 0:
    raise ValueError(f"days = {days}: must be > 0")
  root = pathlib.Path(directory)
  authority = x509.load_pem_x509_certificate((root / "ca.pem").read_bytes())
  authority_key = serialization.load_pem_private_key(
    (root / "ca.key").read_bytes(), password=None
  )
  if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
    raise ValueError(f"{root / 'ca.key'}: must be an elliptic-curve key")
  key = ec.generate_private_key(ec.SECP256R1())
  names = [x509.DNSName(name), *map(_alternative_name, hosts)]
  certificate = (
    _builder(_common_name(name), authority.subject, key.public_key(), days)
    .add_extension(x509.SubjectAlternativeName(dict.fromkeys(names)), False)
    .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    .add_extension(_key_usage(authority=False), True)
    .add_extension(
      x509.ExtendedKeyUsage(
        [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
      ),
      False,
    )
    .add_extension(
      x509.AuthorityKeyIdentifier.from_issuer_public_key(
        authority_key.public_key()
      ),
      False,
    )
    .sign(authority_key, hashes.SHA256())
  )
  _write_key(root / f"{name}.key", key)
  path = root / f"{name}.pem"
  _write(path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
  return path


def _context(
  directory: str | os.PathLike[str], name: str, protocol: int
) -> ssl.SSLContext:
  root = pathlib.Path(directory)
  context = ssl.SSLContext(protocol)
  context.minimum_version = ssl.TLSVersion.TLSv1_3
  context.verify_mode = ssl.CERT_REQUIRED
  for path in (root / "ca.pem", root / f"{name}.pem", root / f"{name}.key"):
    if not path.is_file():
      raise FileNotFoundError(f"{path}: no such certificate or key")
  context.load_verify_locations(root / "ca.pem")
  context.load_cert_chain(root / f"{name}.pem", root / f"{name}.key")
  return context


def server_context(
  directory: str | os.PathLike[str], name: str
) -> ssl.SSLContext:
  """Returns a TLS 1.3 context that serves as `name` and demands a certificate.

  Raises:
    FileNotFoundError: if a certificate or key is missing.
  """
  context = _context(directory, name, ssl.PROTOCOL_TLS_SERVER)
  context.num_tickets = 0  # channels live long: nothing to resume
  return context


def client_context(
  directory: str | os.PathLike[str], name: str
) -> ssl.SSLContext:
  """Returns a TLS 1.3 context that connects as `name` and checks who answers.

  Raises:
    FileNotFoundError: if a certificate or key is missing.
  """
  context = _context(directory, name, ssl.PROTOCOL_TLS_CLIENT)
  context.check_hostname = True
  return context
