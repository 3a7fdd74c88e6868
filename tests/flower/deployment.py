"""A Flower deployment on the loopback: a CA of its own, TLS, node keys, and programs that are stopped by their ids."""

from __future__ import annotations

import datetime
import ipaddress
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.flower.launch import LOOPBACK, Program, environment, free_port, program, until_open, write_connection

PEM, PLAIN = serialization.Encoding.PEM, serialization.NoEncryption()


def authority(folder: Path, name: str) -> tuple[Path, ec.EllipticCurvePrivateKey, x509.Certificate]:
    """A CA: its certificate's file, and what it signs with."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = _signed(subject, subject, key.public_key(), key, x509.BasicConstraints(ca=True, path_length=0))
    path = folder / f"{name}.pem"
    path.write_bytes(certificate.public_bytes(PEM))
    return path, key, certificate


def server_certificate(folder: Path, key: ec.EllipticCurvePrivateKey, ca: x509.Certificate) -> tuple[Path, Path]:
    """Certificate and key of a server on the loopback."""
    own = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "superlink")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))])
    certificate = _signed(subject, ca.subject, own.public_key(), key, names)
    paths = folder / "server.pem", folder / "server.key"
    paths[0].write_bytes(certificate.public_bytes(PEM))
    paths[1].write_bytes(own.private_bytes(PEM, serialization.PrivateFormat.PKCS8, PLAIN))
    return paths


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    key: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    return builder.add_extension(extension, critical=False).sign(key, hashes.SHA256())


def node_key(folder: Path, name: str) -> Path:
    """A node's private key; its public one lies beside it."""
    key = ec.generate_private_key(ec.SECP384R1())
    private, form = folder / name, serialization.PrivateFormat.OpenSSH
    private.write_bytes(key.private_bytes(PEM, form, PLAIN))
    ssh = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    private.with_suffix(".pub").write_bytes(ssh)
    return private


class Deployment:
    """A SuperLink and nodes. `stop` ends all that was started, whatever has happened."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.ca, key, certificate = authority(folder, "ca")
        self.certificate = server_certificate(folder, key, certificate)
        self.started: list[Program] = []
        self.home = folder / "home"
        self.connection = write_connection(self.home, f"{LOOPBACK}:{self.port}", root_certificates=self.ca)

    def start(self, command: list[str], name: str, **more: str) -> Program:
        home = self.home if name == "run" else self.folder / f"home-{name}"
        home.mkdir(exist_ok=True)
        env = environment(home, OMP_NUM_THREADS="1", **more)
        made = Program(command, env, self.folder / f"{name}.log")
        self.started.append(made)
        return made

    def superlink(self) -> Program:
        cert, key = self.certificate
        made = self.start(
            [
                program("flower-superlink"),
                *("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--ssl-ca-certfile", str(self.ca)),
                *("--enable-supernode-auth", "--host", LOOPBACK, "--port", str(self.port)),
                *("--disable-runtime-dependency-installation", "--database", str(self.folder / "superlink.db")),
            ],
            "superlink",
        )
        until_open(made, self.port)
        return made

    def register(self, key: Path) -> None:
        command = [program("flwr"), "supernode", "register", str(key.with_suffix(".pub")), self.connection]
        done = self.start(command, "run")
        assert done.wait(60) == 0, done.said()

    def node_arguments(self, key: Path, config: str, ca: Path | None = None) -> list[str]:
        return [
            *("--root-certificates", str(ca or self.ca), "--superlink", f"{LOOPBACK}:{self.port}"),
            *("--auth-supernode-private-key", str(key), "--host", LOOPBACK, "--port", str(free_port())),
            *("--node-config", config),
        ]

    def run(self, app: Path) -> Program:
        return self.start([program("flwr"), "run", str(app), self.connection, "--stream"], "run")

    def stop(self) -> None:
        for each in reversed(self.started):
            each.stop(5.0)


def until(what: Callable[[], bool], seconds: float, *, watch: Callable[[], None] = lambda: None) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        watch()
        time.sleep(0.5)
    return True


def remote_addresses(sessions: Iterable[int]) -> set[str]:
    """Where the processes of some sessions are connected to, but for this machine (Linux)."""
    wanted, inodes = set(sessions), set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) in wanted:
                inodes |= {os.readlink(file) for file in (process / "fd").iterdir()}
        except OSError:
            continue  # it ended meanwhile
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes:
                found.add(_address(fields[2].partition(":")[0]))
    return {
        address
        for address in found
        if not ipaddress.ip_address(address).is_loopback and int(ipaddress.ip_address(address))
    }


def _address(hexadecimal: str) -> str:
    """As the kernel writes it: words of four bytes, each the wrong way round."""
    words = [bytes.fromhex(hexadecimal[at : at + 8])[::-1] for at in range(0, len(hexadecimal), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
