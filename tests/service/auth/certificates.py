"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


class Files(NamedTuple):
    """A certificate and its key, in PEM."""

    cert: str
    key: str


class Authority:
    """Signs certificates, and writes them into a directory."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"tidelog test {name}")])
        basic = x509.BasicConstraints(ca=True, path_length=None)
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = self._builder(self._name, self._key).add_extension(basic, critical=True)
        certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.path = str(directory / f"{name}.pem")
        Path(self.path).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 30) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 60 * _DAY)
            .not_valid_after(now + days * _DAY)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def signed(self, file: str, common_name: str, *names: str, organization: str = "", days: int = 30) -> Files:
        """A certificate for 127.0.0.1 and these names; with negative `days` it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if organization:
            parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        alternative = x509.SubjectAlternativeName(
            [*(x509.DNSName(name) for name in names), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        builder = self._builder(x509.Name(parts), key, days).add_extension(alternative, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        found = Files(str(self._directory / f"{file}.pem"), str(self._directory / f"{file}.key"))
        Path(found.cert).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        Path(found.key).write_bytes(key.private_bytes(serialization.Encoding.PEM, form, none))
        return found
