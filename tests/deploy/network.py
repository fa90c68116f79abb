"""Which connections NetworkPolicies allow, by the rules of the Kubernetes API (networking.k8s.io/v1)."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Policy = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """One end of a connection. `space` has the labels of its namespace."""

    labels: Mapping[str, str]
    namespace: str = "keepgate"
    space: Mapping[str, str] | None = None

    @property
    def namespace_labels(self) -> Mapping[str, str]:
        """Kubernetes gives each namespace a label with its own name."""
        return {"kubernetes.io/metadata.name": self.namespace, **(self.space or {})}


@dataclass(frozen=True, slots=True)
class Address:
    """An end outside the cluster."""

    ip: str


End = Pod | Address


def allows(policies: Sequence[Policy], source: End, destination: End, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection may be opened: by the policies of its source, and by those of its destination."""
    return _permits(policies, "Egress", source, destination, port, protocol) and _permits(
        policies, "Ingress", destination, source, port, protocol
    )


def _permits(policies: Sequence[Policy], direction: str, own: End, other: End, port: int, protocol: str) -> bool:
    """A pod that no policy is for is open."""
    if isinstance(own, Address):
        return True
    mine = [
        policy
        for policy in policies
        if policy["metadata"]["namespace"] == own.namespace
        and direction in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], own.labels)
    ]
    peers, rules = ("from", "ingress") if direction == "Ingress" else ("to", "egress")
    return not mine or any(
        _is_peer(rule.get(peers), policy, other) and _is_port(rule.get("ports"), port, protocol)
        for policy in mine
        for rule in policy["spec"].get(rules, ())
    )


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}, "expressions are not evaluated here"
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def _is_peer(peers: Sequence[Mapping[str, Any]] | None, policy: Policy, other: End) -> bool:
    return not peers or any(_matches(peer, policy["metadata"]["namespace"], other) for peer in peers)


def _matches(peer: Mapping[str, Any], namespace: str, other: End) -> bool:
    if isinstance(other, Address):
        block = peer.get("ipBlock")
        ip = ipaddress.ip_address(other.ip)
        return (
            block is not None
            and ip in ipaddress.ip_network(block["cidr"])
            and not any(ip in ipaddress.ip_network(part) for part in block.get("except", ()))
        )
    if "ipBlock" in peer:
        return False  # no pod of these manifests has an address that is named
    spaces = peer.get("namespaceSelector")
    if spaces is None and other.namespace != namespace:
        return False
    return _selects(spaces or {}, other.namespace_labels) and _selects(peer.get("podSelector", {}), other.labels)


def _is_port(ports: Sequence[Mapping[str, Any]] | None, port: int, protocol: str) -> bool:
    return not ports or any((entry["protocol"], entry["port"]) == (protocol, port) for entry in ports)
