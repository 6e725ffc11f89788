"""Run the README's first program with the installed package, and look at what was built.

python tools/first_program.py README.md dist
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path


def main(readme: Path, dist: Path) -> None:
    """Raise if the package isn't whole, or isn't the one that was built."""
    import xla_dtensor

    where = Path(xla_dtensor.__file__)
    assert "site-packages" in where.parts, f"{where}: this is not the installed package"
    version = xla_dtensor.__version__
    (wheel,) = dist.glob(f"xla_dtensor-{version}-py3-none-any.whl")
    (sdist,) = dist.glob(f"xla_dtensor-{version}.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("xla_dtensor/py.typed", "xla_dtensor/compilation/README.md"):
        assert wanted in names, f"{wheel.name} has no {wanted}"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "xla_dtensor/__init__.py"} <= sources
    missing = {n for n in names if n.startswith("xla_dtensor/")} - sources
    assert not missing, f"{sdist.name} has not {sorted(missing)[:5]}"
    (program, *_) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    print(f"{wheel.name}: the README's first program ran")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
