"""TLS of both listeners: the server's certificate, and who a client's certificate is about.

Invariants
- TLS 1.2 is the oldest that is spoken.
- Certificates, keys and the roots of clients are replaced while it runs (`reload`). New ones count for connections from
  then on; ones that cannot be used leave the old ones in force.
- A client's certificate is believed only if it is signed by a root of `tls_client_ca` and has not expired; OpenSSL
  refuses the connection otherwise.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.x509.oid import NameOID

from tidelog.errors import ConfigError
from tidelog.files import explained
from tidelog.service.auth.access import NotAuthenticatedError, Principal, check_principal_name

Naming = Literal["common_name", "subject", "san"]
CERTIFICATE = "certificate"


class ServerTls:
    """The TLS of a server. Its `context` is for listeners, and stays the same when certificates are replaced."""

    def __init__(self, cert: Path, key: Path | None, client_ca: Path | None) -> None:
        self._files = cert, key, client_ca
        self._current = self._loaded()
        self.context = self._loaded()
        self.context.sni_callback = self._use_current

    def _use_current(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        # OpenSSL calls this for every handshake, with or without a name: the connection goes on with the newest files.
        connection.context = self._current

    def reload(self) -> None:
        """Reads the files again; ConfigError when they cannot be used, and then nothing changes."""
        self._current = self._loaded()

    def _loaded(self) -> ssl.SSLContext:
        cert, key, client_ca = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for path in (cert, key, client_ca):
            if path is not None:
                with explained("read the TLS files", path), path.open("rb"):
                    pass
        try:
            # A password is refused, not asked for on a terminal that a server does not have.
            context.load_cert_chain(cert, key, password=lambda: b"")
        except (ssl.SSLError, ValueError):
            hint = "Expected is PEM, the key of this certificate, without a password"
            raise ConfigError("the certificate and the key cannot be used", path=cert, hint=hint) from None
        if client_ca is not None:
            try:
                context.load_verify_locations(client_ca)
            except (ssl.SSLError, ValueError):
                raise ConfigError("the file has no certificates in PEM", path=client_ca) from None
            context.verify_mode = ssl.CERT_OPTIONAL
        return context


def principal_of_certificate(der: bytes, naming: Naming) -> Principal:
    """Who a certificate, which OpenSSL has verified, is about."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        name = _name_in(certificate, naming)
        checked = check_principal_name(name or "")
    except ValueError:
        raise NotAuthenticatedError(f"the client's certificate has no usable {naming}") from None
    return Principal(checked, CERTIFICATE, format(certificate.serial_number, "x"), _end_of(certificate))


def _end_of(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()


def _name_in(certificate: x509.Certificate, naming: Naming) -> str | None:
    if naming == "subject":
        return certificate.subject.rfc4514_string()
    if naming == "common_name":
        found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(found[0].value) if len(found) == 1 else None
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    kinds = (x509.DNSName, x509.RFC822Name, x509.UniformResourceIdentifier)
    texts = [str(name.value) for name in names if isinstance(name, kinds)]
    return texts[0] if texts else None
