"""Provides figures of GPUs from public data sheets.

The sources are NVIDIA's data sheets of A100 80GB SXM, H100 SXM5, H800 SXM5, H200 SXM, B200 (HGX),
L40S and RTX A6000. Rates are those of dense (not sparse) bfloat16. NVLink is half of the quoted
bidirectional bandwidth; for GPUs without NVLink, it is the bandwidth of PCIe. The network bandwidth
is that of one GPU in a DGX system of the same generation: 200 Gb/s for A100, 400 Gb/s for H100 and
later. For PCIe cards it is assumed to be 100 Gb/s.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from megatron_async.config.simulate import GpuConfig, GpuName


@dataclass(frozen=True)
class Gpu:
    """Peak figures of one GPU.

    Attributes:
        flops: Dense bfloat16 rate in FLOP/s.
        memory: Memory in bytes.
        memory_bandwidth: Memory bandwidth in bytes/s.
        nvlink: Bandwidth to another GPU of the node in one direction, in bytes/s.
        network: Bandwidth to another node in one direction, in bytes/s.
        pcie: Bandwidth to host memory in one direction, in bytes/s.
    """

    flops: float
    memory: float
    memory_bandwidth: float
    nvlink: float
    network: float
    pcie: float


_T, _G = 1e12, 1e9
DATA_SHEETS: Final = MappingProxyType[GpuName, Gpu](
    {
        "A100": Gpu(312 * _T, 80 * _G, 2.039 * _T, 300 * _G, 25 * _G, 32 * _G),
        "H100": Gpu(989 * _T, 80 * _G, 3.35 * _T, 450 * _G, 50 * _G, 64 * _G),
        "H800": Gpu(989 * _T, 80 * _G, 3.35 * _T, 200 * _G, 50 * _G, 64 * _G),
        "H200": Gpu(989 * _T, 141 * _G, 4.8 * _T, 450 * _G, 50 * _G, 64 * _G),
        "B200": Gpu(2250 * _T, 180 * _G, 7.7 * _T, 900 * _G, 50 * _G, 64 * _G),
        "L40S": Gpu(362 * _T, 48 * _G, 0.864 * _T, 32 * _G, 12.5 * _G, 32 * _G),
        "A6000": Gpu(154.8 * _T, 48 * _G, 0.768 * _T, 56 * _G, 12.5 * _G, 32 * _G),
    }
)


def gpu_of(config: GpuConfig) -> Gpu:
    """Return the figures of the GPU that `config` names. Figures that `config` sets replace those
    of the data sheet."""
    sheet = DATA_SHEETS[config.name]

    def figure(own: float | None, unit: float, default: float) -> float:
        return default if own is None else own * unit

    return Gpu(
        figure(config.bf16_tflops, _T, sheet.flops),
        figure(config.memory_gb, _G, sheet.memory),
        figure(config.memory_tb_per_s, _T, sheet.memory_bandwidth),
        figure(config.nvlink_gb_per_s, _G, sheet.nvlink),
        figure(config.network_gb_per_s, _G, sheet.network),
        figure(config.pcie_gb_per_s, _G, sheet.pcie),
    )
