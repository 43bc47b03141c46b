"""The project's own shape: folders and links agree, imports point one way."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("runtime", "kernels_pallas", "models", "sharding", "server")
MAY_IMPORT = {
    "server": {"server", "runtime", "models", "kernels_pallas", "sharding"},
    "runtime": {"runtime", "models", "kernels_pallas", "sharding"},
    "models": {"models", "kernels_pallas", "sharding"},
    "kernels_pallas": {"kernels_pallas"},
    "sharding": {"sharding"},
}


def imports(path):
    """Names of precast's packages that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "precast":
                names = [f"precast.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("precast."))


def test_folders_and_links_agree():
    links = {path.name: path for path in (ROOT / "src" / "precast").iterdir() if path.is_symlink()}
    assert set(links) == set(PACKAGES)
    for name, link in links.items():
        assert not link.readlink().is_absolute()
        assert link.resolve() == ROOT / name
        assert (ROOT / name / "__init__.py").exists()


def test_imports_point_one_way():
    for package, allowed in MAY_IMPORT.items():
        for path in (ROOT / package).rglob("*.py"):
            assert set(imports(path)) <= allowed, path


def test_the_environment_is_read_in_the_front_doors_only():
    for package in PACKAGES[:4]:
        for path in (ROOT / package).rglob("*.py"):
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), path
