"""What kvrag's connector uses of vLLM, and what a version of vLLM has. Sources are read, and never imported.

    python tests/vllm_interface.py WHEEL_OR_FOLDER...   # describe these versions anew; `make vllm-interface` fetches them

The descriptions, ``tests/data/vllm_interface.json``, have a line for each name of vLLM's, and its members, that the connector uses:
the parameters of a function, the class of another value if it is vLLM's, ``null`` where there is none of the name.
Where versions differ they are told apart.
"""

import ast
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "integrations" / "vllm" / "vllm_kvrag"
DESCRIBED = ROOT / "tests" / "data" / "vllm_interface.json"
BACKEND = "vllm.v1.attention.backend"
FRONTEND = "|".join(
    f"vllm.entrypoints.{each}.cli_args:FrontendArgs" for each in ("common", "launchers", "openai")
)
UPDATE = "do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)"
UNTYPED = {
    f"{BACKEND}:AttentionBackend": ("get_builder_cls()", "forward_includes_kv_cache_update"),
    f"{BACKEND}:AttentionMetadataBuilder": (
        "__init__(spec, names, vllm_config, device)",
        "build(0, common)",
    ),
    **{
        f"{BACKEND}s.{name}": (UPDATE, "scale", "logits_soft_cap", "sinks", "alibi_slopes")
        for name in (
            "cpu_attn:CPUAttentionBackendImpl",
            "flash_attn:FlashAttentionImpl",
            "flashinfer:FlashInferImpl",
            "triton_attn:TritonAttentionImpl",
        )
    },
    "vllm.config:CompilationConfig": ("mode", "static_forward_context"),
    "vllm.config:LoadConfig": ("load_format",),
    "vllm.engine.arg_utils:EngineArgs": (
        *("model", "kv_transfer_config", "load_format", "dtype", "served_model_name"),
        *("revision", "tokenizer", "tokenizer_mode"),
    ),
    FRONTEND: (
        *("uds", "enable_prompt_tokens_details", "default_chat_template_kwargs", "chat_template"),
        *("api_key", "root_path", "ssl_keyfile", "ssl_certfile", "host", "port"),
    ),
    "vllm.lora.lora_model:LoRAModel": ("id", "loras"),
    "vllm.lora.model_manager:LRUCacheLoRAModelManager": (
        *("activate_adapter(number)", "set_adapter_mapping(mapping)", "list_adapters()"),
        "_last_mapping",
    ),
    "vllm.model_executor.layers.attention:Attention": (
        *("get_attn_backend()", "attn_backend", "impl", "kv_cache", "num_kv_heads", "head_size"),
        *("head_size_v", "kv_sharing_target_layer_name", "sliding_window"),
    ),
    "vllm.model_executor.models.llama:LlamaForCausalLM": (
        "forward(input_ids=0, positions=0, inputs_embeds=0)",
        *("embed_input_ids(ids)", "compute_logits(hidden)"),
    ),
    "vllm.v1.core.sched.output:NewRequestData": ("req_id", "num_computed_tokens"),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ("kv_cache_spec", "layer_names"),
}
"""What is used of objects whose class the connector's sources do not tell: members, and calls."""
WORDS = {
    "vllm.entrypoints.cli.main": {"serve": "vllm.entrypoints.cli.main"},
    "vllm.entrypoints.openai.api_server": {"__main__": "vllm.entrypoints.openai.api_server"},
    "vllm.lora.model_manager": {"self.model.lora_manager = self": '"lora_manager"'},
    "vllm.model_executor.layers.attention.attention": {
        "no_compile_layers": "no_compile_layers",
        "do_kv_cache_update": "do_kv_cache_update",
    },
    "vllm.plugins": {"vllm.general_plugins": "def register()"},
    "vllm.renderers.online_renderer": {'kv.pop("prompt_token_ids"': '"prompt_token_ids"'},
}
"""Words of modules: what they look for on vLLM's objects and in requests, commands, and an entry point; with the words in the
connector's sources that need them there."""
OWN_METHODS = {"Counts.add"}
"""Public methods of classes derived from vLLM's that override none of vLLM's."""
OPEN = "*"
"""Member of a class whose others come from outside of vLLM."""
Thing = str | dict[str, str]
"""A described function, ``(parameters) class``; a class or a module, its members; a class by its name; or ``""``."""


class Use(NamedTuple):
    """Use of a name of vLLM's: its members in turn (``()``: what a call returns), and the arguments that the last one gets, or the
    parameters of the method in its place."""

    where: str
    name: str
    members: tuple[str, ...] = ()
    arguments: tuple[int, tuple[str, ...]] | None = None
    override: str | None = None

    @property
    def key(self) -> str:
        """The name and its members."""
        return " ".join([self.name, *self.members])

    @property
    def is_call(self) -> bool:
        """Whether parameters matter."""
        return self.arguments is not None or self.override is not None


# -- a version of vLLM -------------------------------------------------------------------------------


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those under conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from statements([*node.body, *node.orelse])


def assigned(node: ast.AST) -> list[str]:
    """Variables that a statement at the top of a module or a class assigns."""
    parts = [
        each
        for target in getattr(node, "targets", [getattr(node, "target", node)])
        for each in ast.walk(target)
    ]
    return [x.id for x in parts if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]


def is_own(node: ast.AST) -> bool:
    """Whether this is an attribute of ``self``."""
    return isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"


def set_on_self(node: ast.AST) -> list[str]:
    """Attributes that a method sets."""
    parts = [*ast.walk(node)]
    buffers = [
        x.args[0]
        for x in parts
        if isinstance(x, ast.Call) and getattr(x.func, "attr", "") == "register_buffer"
    ]
    own = [x.attr for x in parts if is_own(x) and isinstance(x.ctx, ast.Store)]
    return own + [x.value for x in buffers if isinstance(x, ast.Constant)]


def parameters(node: ast.FunctionDef, *, is_method: bool = False) -> str:
    """Parameters in parentheses, without ``self``; defaults are 0."""
    args = node.args
    kept = ast.arguments(
        posonlyargs=[],
        args=[ast.arg(each.arg) for each in (*args.posonlyargs, *args.args)][is_method:],
        vararg=args.vararg and ast.arg(args.vararg.arg),
        kwonlyargs=[ast.arg(each.arg) for each in args.kwonlyargs],
        kw_defaults=[each and ast.Constant(0) for each in args.kw_defaults],
        kwarg=args.kwarg and ast.arg(args.kwarg.arg),
        defaults=[ast.Constant(0) for _ in args.defaults],
    )
    return f"({ast.unparse(kept)})"


class Module:
    """What a module defines and imports."""

    def __init__(self, name: str, text: str, *, is_package: bool) -> None:
        self.text = text
        self.nodes: dict[str, ast.stmt] = {}
        self.imports: dict[str, str] = {}
        parts = name.split(".")
        for node in statements(ast.parse(text).body):
            if isinstance(node, ast.ImportFrom):
                above = parts[: len(parts) + is_package - node.level] if node.level else []
                module = ".".join([*above, *([node.module] if node.module else [])])
                self.imports |= {a.asname or a.name: f"{module}:{a.name}" for a in node.names}
            else:
                own = (
                    [node.name]
                    if isinstance(node, ast.ClassDef | ast.FunctionDef)
                    else assigned(node)
                )
                self.nodes |= dict.fromkeys(own, node)


class Sources:
    """A version in a wheel, or in a folder of installed packages."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._archive = None if place.is_dir() else zipfile.ZipFile(place)
        self.module = cache(self._module)
        names = (
            [place.name] if self._archive else [each.name for each in place.glob("vllm*.dist-info")]
        )
        found = [re.match(r"vllm(?:_cpu)?-(\d+\.\d+\.\d+)", name) for name in names]
        (self.version,) = [each[1] for each in found if each]

    def _module(self, name: str) -> Module | None:
        for end, is_package in (("/__init__.py", True), (".py", False)):
            path = name.replace(".", "/") + end
            try:
                text = (
                    self._archive.read(path) if self._archive else (self._place / path).read_bytes()
                )
            except (KeyError, OSError):
                continue
            return Module(name, text.decode(), is_package=is_package)
        return None

    def defined(self, name: str) -> str | None:
        """Where a name is defined."""
        place, _, own = name.partition(":")
        module = self.module(place) if place.partition(".")[0] == "vllm" else None
        if module is None or not own or own in module.nodes:
            return module and name
        return self.defined(module.imports[own]) if own in module.imports else None

    def thing(self, name: str) -> Thing:
        """Describe what is defined there."""
        place, _, own = name.partition(":")
        module = self.module(place)
        assert module is not None
        if not own:
            return dict.fromkeys([word for word in WORDS[name] if word in module.text], "")
        node = module.nodes[own]
        if isinstance(node, ast.ClassDef):
            return self._members(node, place)
        return self._function(node, place) if isinstance(node, ast.FunctionDef) else ""

    def _function(self, node: ast.FunctionDef, place: str, *, is_method: bool = False) -> str:
        return f"{parameters(node, is_method=is_method)} {self._class(node.returns, place)}".strip()

    def _class(self, annotation: ast.AST | None, place: str) -> str:
        """The class of vLLM's that an annotation names, perhaps beside ``None``."""
        match annotation:
            case ast.Constant(value=str(text)):
                return self._class(ast.parse(text, mode="eval").body, place)
            case ast.BinOp(left=left, right=right):
                return self._class(left, place) or self._class(right, place)
            case ast.Name(id=name):
                found = self.defined(f"{place}:{name}") or ""
                module = self.module(found.partition(":")[0])
                is_class = module and isinstance(
                    module.nodes[found.partition(":")[2]], ast.ClassDef
                )
                return found if is_class else ""
        return ""

    def _members(self, node: ast.ClassDef, place: str) -> dict[str, str]:
        found: dict[str, str] = {}
        fields: dict[str, bool] = {}
        for base in reversed(node.bases):
            name = self.defined(f"{place}:{ast.unparse(base)}")
            above = (
                self.thing(name) if name else {OPEN: ""} if ast.unparse(base) == "Logger" else {}
            )
            assert isinstance(above, dict)
            found |= above
        for each in statements(node.body):
            if isinstance(each, ast.FunctionDef):
                marks = [ast.unparse(mark) for mark in each.decorator_list]
                said = self._function(each, place, is_method="staticmethod" not in marks)
                is_value = any("property" in mark for mark in marks)
                found = dict.fromkeys(set_on_self(each), "") | found
                found[each.name] = said.partition(")")[2].strip() if is_value else said
            else:
                annotation = getattr(each, "annotation", None)
                found |= dict.fromkeys(assigned(each), self._class(annotation, place))
                fields |= dict.fromkeys(
                    assigned(each) if annotation else (), getattr(each, "value", None) is not None
                )
        if (
            node.decorator_list
            and fields
            and "__init__" not in [getattr(each, "name", "") for each in node.body]
        ):
            known = re.findall(r"(\w+)(=0)?", found.get("__init__", ""))
            fields = {name: bool(default) for name, default in known} | fields
            given = [name + "=0" * has_default for name, has_default in fields.items()]
            found["__init__"] = f"({', '.join(sorted(given, key=lambda one: '=' in one))})"
        return found


# -- the connector -----------------------------------------------------------------------------------

Path_ = tuple[str, tuple[str, ...]]
"""A name of vLLM's, and members in turn."""


class Uses(ast.NodeVisitor):
    """Uses of vLLM in a file: imports, and what is reached from annotated parameters, imported names, and ``self`` of derived classes."""

    def __init__(self, file: str, text: str) -> None:
        self.found: list[Use] = []
        self._file = file
        self._known: dict[str, Path_] = {}
        self._on_self: dict[str, Path_] = {}
        self._base: str | None = None
        self._own: set[str] = set()
        self.visit(ast.parse(text))

    def _add(self, node: ast.AST, path: Path_, **more: Any) -> None:
        self.found.append(Use(f"{self._file}:{node.lineno}", *path, **more))  # type: ignore[attr-defined]

    def _path(self, node: ast.AST | None) -> Path_ | None:
        match node:
            case ast.Name(id=name):
                return self._known.get(name)
            case ast.BinOp(left=left, right=right):  # in an annotation
                return self._path(left) or self._path(right)
            case ast.Call(func=ast.Name(id="super")) if self._base:
                return self._base, ()
            case ast.Call(func=func):
                name, members = self._path(func) or ("", ())
                return (name, (*members, "()")) if name else None
            case ast.Attribute(value=value, attr=attr):
                if is_own(node) and (attr in self._own or self._base is None):
                    return self._on_self.get(attr)
                name, members = (
                    (self._base or "", ()) if is_own(node) else self._path(value) or ("", ())
                )
                return (name, (*members, attr)) if name else None
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Note imported names."""
        if (node.module or "").partition(".")[0] == "vllm":
            for each in node.names:
                path = f"{node.module}:{each.name}", ()
                self._known[each.asname or each.name] = path
                self._add(node, path)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Note what a class of ours overrides."""
        bases = [path[0] for base in node.bases if (path := self._path(base))]
        self._base = bases[0] if bases else None
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        self._own = {name for each in node.body for name in [*assigned(each), *set_on_self(each)]}
        self._own |= {each.name for each in methods}
        self._on_self = {}
        for each in methods if self._base else ():
            if (
                each.name[0] != "_" or each.name == "__init__"
            ) and f"{node.name}.{each.name}" not in OWN_METHODS:
                is_method = "staticmethod" not in map(ast.unparse, each.decorator_list)
                self._add(
                    each, (bases[0], (each.name,)), override=parameters(each, is_method=is_method)
                )
        self.generic_visit(node)
        self._base, self._own = None, set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Note what is reached in a function."""
        outside = dict(self._known)
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for name in {
            x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
        }:
            self._known.pop(name, None)
        self._known |= {each.arg: path for each in args if (path := self._path(each.annotation))}
        self.generic_visit(node)
        self._known = outside

    def visit_Assert(self, node: ast.Assert) -> None:
        """Forget a parameter that is found to be of a class of ours."""
        match node.test:
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), _]):
                self._known.pop(name, None)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Follow an assigned value."""
        self.generic_visit(node)
        path, (target, *_) = self._path(node.value), node.targets
        if path and isinstance(target, ast.Name):
            self._known[target.id] = path
        elif path and is_own(target):
            self._on_self[target.attr] = path  # type: ignore[attr-defined]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note a member."""
        path = self._path(node)
        if path:
            self._add(node, path)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Note a call, unless its arguments are not to be seen."""
        path = self._path(node.func)
        names = tuple(each.arg for each in node.keywords)
        if path and None not in names and not any(isinstance(x, ast.Starred) for x in node.args):
            self._add(node, path, arguments=(len(node.args), names))
        self.generic_visit(node)


def uses(package: Path = PACKAGE) -> list[Use]:
    """All uses of vLLM by the connector."""
    found = [
        use
        for path in sorted(package.rglob("*.py"))
        for use in Uses(path.name, path.read_text()).found
    ]
    for name, members in UNTYPED.items():
        for each in members:
            node = ast.parse(each, mode="eval").body
            call = node if isinstance(node, ast.Call) else None
            arguments = call and (len(call.args), tuple(str(k.arg) for k in call.keywords))
            found.append(Use("UNTYPED", name, (each.partition("(")[0],), arguments))
    texts = "".join(path.read_text() for path in package.rglob("*.py"))
    for name, words in WORDS.items():
        found += [Use("WORDS", name, (theirs,)) for theirs, ours in words.items() if ours in texts]
    return found


# -- both --------------------------------------------------------------------------------------------


def signature(text: str) -> inspect.Signature:
    """The signature of a described function."""
    return inspect.signature(eval(f"lambda {text[1:].partition(')')[0]}: 0"))


def misfit(theirs: str, use: Use) -> str | None:
    """Why a function doesn't take a call's arguments, or a method of ours not those that vLLM gives to its own."""
    try:
        if use.arguments:
            count, names = use.arguments
            signature(theirs).bind(*range(count), **dict.fromkeys(names))
        if use.override:
            given = [
                each
                for each in signature(theirs).parameters.values()
                if each.kind is each.POSITIONAL_OR_KEYWORD
            ]
            named = {
                k: 0
                for k, each in signature(theirs).parameters.items()
                if each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD)
            }
            signature(use.override).bind(*given, **named)
            if use.members != ("__init__",) and "*" not in use.override:
                signature(use.override).bind(**{each.name: 0 for each in given}, **named)
    except TypeError as error:
        return f"{error}: {theirs}"
    return None


def found(sources: Sources, use: Use) -> str | None:
    """What a version has in place of a use: a function's parameters, a class, or ``""``; ``None``: nothing."""
    at = next(filter(None, map(sources.defined, use.name.split("|"))), None)
    value: Thing | None = at and sources.thing(at)
    for member in use.members:
        if isinstance(value, str) and value[:1] not in ("", "("):
            value = sources.thing(value)
        if isinstance(value, dict) and member != "()":
            value = value.get(member, value.get(OPEN))
        elif isinstance(value, str):
            value = value.partition(")")[2].strip() if member == "()" else ""
    if use.is_call and isinstance(value, dict):
        value = value.get("__init__", "")
    return value if use.is_call or value is None else ""


Descriptions = dict[str, str | dict[str, str | None] | None]


def described(places: Iterable[Sources], used: Iterable[Use]) -> Descriptions:
    """Describe uses in several versions."""
    whole: Descriptions = {}
    for use in sorted(used, key=lambda use: (use.key, use.is_call)):
        by_version = {each.version: found(each, use) for each in places}
        values = [*by_version.values()]
        whole[use.key] = values[0] if len({*values}) == 1 else by_version
    return whole


def faults(version: str, descriptions: Descriptions, used: Iterable[Use]) -> list[str]:
    """Uses that a version does not allow, in sentences."""
    said = set()
    for use in used:
        value = descriptions.get(use.key, {})
        if isinstance(value, dict):
            value = value.get(version, "not described: run `make vllm-interface`")
        why = (
            "it has none"
            if value is None
            else misfit(value, use)
            if value[:1] == "("
            else value[:13] == "not described" and value
        )
        if why:
            said.add(f"{use.where}: {use.key}: {why}")
    return sorted(said)


if __name__ == "__main__":
    places = [Sources(Path(each)) for each in sys.argv[1:]]
    whole = described(places, uses())
    DESCRIBED.write_text(json.dumps(whole, indent=0) + "\n")
    for each in places:
        print(f"vLLM {each.version}", *faults(each.version, whole, uses()), sep="\n  ")
