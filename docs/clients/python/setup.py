"""Builds the package, with modules made of the .proto files beside it."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PROTOS = Path(__file__).resolve().parents[3] / "proto"


class WithStubs(build_py):
    """Adds `hvprobe.v1`, messages and stubs with their types, to what is built."""

    def run(self):
        super().run()
        import grpc_tools
        from grpc_tools import protoc

        files = sorted(PROTOS.glob("hvprobe/v1/*.proto"))
        outputs = [f"--{kind}_out={self.build_lib}" for kind in ("python", "pyi", "grpc_python")]
        # Ours, and those of Google's that they need.
        folders = [PROTOS, Path(grpc_tools.__file__).parent / "_proto"]
        paths = [f"--proto_path={folder}" for folder in folders]
        if protoc.main(["protoc", *paths, *outputs, *map(str, files)]) != 0:
            raise SystemExit(f"the .proto files in {PROTOS} cannot be compiled")


setup(cmdclass={"build_py": WithStubs})
