"""YAML as people write it: PyYAML's safe loader, but 1e-6 is a number and a key given twice is an error."""

from __future__ import annotations

import re
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"
_TEXT = "tag:yaml.org,2002:str"


class _Loader(yaml.SafeLoader):
    """Safe loader with YAML 1.2 floats and no silent duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As PyYAML's, but each key stands once."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        _refuse_twice(node)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Bring in what `<<` names: a mapping's own keys win, then those of the source that is named first.

        Releases of PyYAML differ in which of two sources wins.
        """
        pairs, node.value = node.value, []
        sources = [source for key, value in pairs if key.tag == _MERGE for source in self._sources(value)]
        own = [pair for pair in pairs if pair[0].tag != _MERGE]
        found: dict[Any, Any] = {}
        for key, value in [*own, *(pair for source in sources for pair in source.value)]:
            found.setdefault(
                (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key), (key, value)
            )
        node.value = list(found.values())

    def _sources(self, node: yaml.Node) -> list[yaml.MappingNode]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "<< names something else than mappings", source.start_mark
                )
            self.flatten_mapping(source)
        return list(sources)


_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _refuse_twice(node: yaml.MappingNode) -> None:
    """Refuse a key that a mapping holds twice as it is written, before merge keys bring in those of others."""
    seen: set[str] = set()
    for key, _ in node.value:
        if key.tag != _TEXT:
            continue
        if key.value in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key.value!r} is given twice", key.start_mark
            )
        seen.add(key.value)


def parse_yaml(text: str) -> Any:
    """Plain values from YAML text; nothing in it can run code."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of SafeLoader
