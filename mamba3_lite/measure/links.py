"""How GPUs are connected: stated speeds by name, and the cluster that ``plan`` is asked about."""

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import typer

from mamba3_lite.errors import UserError
from mamba3_lite.schema import nearest

MOST_GPUS = 1024


class Link(NamedTuple):
    """A way between GPUs by its data sheet: bytes/s in one direction, seconds of a ring's hop."""

    name: str
    bytes_per_sec: float
    hop_sec: float


# Hops are those of NCCL's own model (ring, protocol Simple). NVLink is stated as the sum of both
# directions (600, 900, 1,800 GB/s), and so is PCIe x16 (64 GB/s at 4.0).
_NVLINK_HOP, _PCIE_HOP, _NETWORK_HOP = 3.4e-6, 5.7e-6, 14e-6
_NVLINK_3 = Link("NVLink 3", 300e9, _NVLINK_HOP)
_NVLINK_4 = Link("NVLink 4", 450e9, _NVLINK_HOP)
_NVLINK_5 = Link("NVLink 5", 900e9, _NVLINK_HOP)
_PCIE_4 = Link("PCIe 4.0 x16", 32e9, _PCIE_HOP)
_PCIE_5 = Link("PCIe 5.0 x16", 64e9, _PCIE_HOP)
LINKS = {
    "A100": _NVLINK_3,
    "A100 40GB": _NVLINK_3,
    "H100": _NVLINK_4,
    "H100 PCIe": _PCIE_5,
    "H200": _NVLINK_4,
    "B200": _NVLINK_5,
    "L40S": _PCIE_4,
    "L4": _PCIE_4,
    "A10": _PCIE_4,
    "RTX 4090": _PCIE_4,
    "RTX 3090": _PCIE_4,
}


class NodeLink(NamedTuple):
    """A port of a node by its data sheet, bytes/s in one direction; one a GPU, or one for all."""

    name: str
    bytes_per_sec: float
    each_gpu: bool


NODE_LINKS = {
    "NDR": NodeLink("InfiniBand NDR, 400 Gb/s a GPU", 50e9, True),
    "HDR": NodeLink("InfiniBand HDR, 200 Gb/s a GPU", 25e9, True),
    "XDR": NodeLink("InfiniBand XDR, 800 Gb/s a GPU", 100e9, True),
    "100GbE": NodeLink("Ethernet, 100 Gb/s a node", 12.5e9, False),
}

GpusOption = Annotated[
    int, typer.Option(help="GPUs of a node, as torchrun's --nproc_per_node; in all: times --nodes.")
]
NodesOption = Annotated[int, typer.Option(help="Nodes, as torchrun's --nnodes.")]
NodeLinkOption = Annotated[
    str, typer.Option(help=f"Network between nodes by name: {', '.join(NODE_LINKS)}.")
]
LinkSpeedOption = Annotated[
    float | None,
    typer.Option(
        "--link-gb-s", help="GB/s that a GPU sends within its node, instead of a sheet's."
    ),
]
NodeLinkSpeedOption = Annotated[
    float | None,
    typer.Option(
        "--node-link-gb-s", help="GB/s that a whole node sends to others, instead of --node-link."
    ),
]
PictureOption = Annotated[
    str | None, typer.Option(help="Also draw efficiency against GPUs into this PNG file.")
]


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs.

    Attributes:
        gpus, nodes: GPUs of a node, and nodes.
        between: what a whole node sends to others.
        within: what a GPU sends inside its node; None: by the sheet of the GPU.
    """

    gpus: int
    nodes: int
    between: Link
    within: Link | None = None

    @property
    def ranks(self) -> int:
        """One a GPU."""
        return self.gpus * self.nodes

    def link(self, gpu: str) -> Link:
        """Within a node of this GPU (a name of ``hardware.GPU_NAMES``)."""
        return self.within._replace(hop_sec=LINKS[gpu].hop_sec) if self.within else LINKS[gpu]


def asked_cluster(
    gpus: int, nodes: int, node_link: str, link_gb_s: float | None, node_link_gb_s: float | None
) -> Cluster | None:
    """The cluster of the command line; None for a single GPU. ``UserError`` on what makes none."""
    if gpus < 1 or nodes < 1:
        raise UserError(f"--gpus {gpus} --nodes {nodes}: both must be at least 1.")
    if gpus * nodes > MOST_GPUS:
        raise UserError(
            f"--gpus {gpus} --nodes {nodes} are {gpus * nodes:,} GPUs (--gpus is per node); "
            f"plan reckons with up to {MOST_GPUS:,}."
        )
    for option, speed in (("--link-gb-s", link_gb_s), ("--node-link-gb-s", node_link_gb_s)):
        if speed is not None and not 0 < speed < math.inf:
            raise UserError(f"{option} {speed:g} must be a positive number of GB/s.")
    names = {name.lower(): name for name in NODE_LINKS}
    if node_link.lower() not in names:
        raise UserError(
            f"--node-link {node_link!r} is unknown{nearest(node_link, tuple(NODE_LINKS))}; known "
            f"are {', '.join(NODE_LINKS)}; or state --node-link-gb-s."
        )
    port = NODE_LINKS[names[node_link.lower()]]
    between = Link(port.name, port.bytes_per_sec * (gpus if port.each_gpu else 1), _NETWORK_HOP)
    if node_link_gb_s is not None:
        between = Link("stated", node_link_gb_s * 1e9, _NETWORK_HOP)
    within = None if link_gb_s is None else Link("stated", link_gb_s * 1e9, _NVLINK_HOP)
    return None if gpus * nodes == 1 else Cluster(gpus, nodes, between, within)
