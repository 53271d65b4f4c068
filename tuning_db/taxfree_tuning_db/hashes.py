"""Versions of measurements that name a hash of their kernel's sources instead.

taxfree 0.1 wrote such hashes into databases, exports and result files. This table, and its use in
:mod:`.renamed`, go with taxfree 0.3. Any other hash is of earlier sources: version 0.
"""

from __future__ import annotations

#: operation -> variant -> the hash of its sources when versions began
HASHES_OF_VERSION_1: dict[str, dict[str, str]] = {
    "all_gather_matmul": {
        "baseline": "60cc8282ab901ece",
        "one_shot": "211d1662509d4a50",
        "overlap": "ff8b6c8894412f31",
        "pull": "4da7e65defad36bc",
        "push": "80f3c84ca44bbaf5",
        "push_specialized": "bcf7b15b56171028",
        "push_tma": "65cdc2e33dea2638",
        "push_two_kernel": "d3c8dc962d79f0d4",
        "registered": "d1d7e8a5ecd78104",
        "torch_fused": "a60f385c7e4aebbd",
    },
    "attention": {
        "baseline": "055dd52852dfb1fc",
        "flash": "c992d304cec1844a",
        "warp_specialized": "59770eb6da98d8b0",
    },
    "flash_decode": {
        "baseline": "a85be36255d00147",
        "fine_wait": "f5871b6f699416ab",
        "fused": "8df05651dfc602c0",
        "gather": "64f346c5ee352ea1",
        "library": "657cdcd485585fe1",
        "persistent": "0766f31bd1f8002e",
    },
    "matmul_all_reduce": {
        "baseline": "8be09c30e7d530dc",
        "push": "0cbb369b19fc78f3",
        "push_in_place": "de1e567032707840",
        "push_lamport": "79b7f05d80e9711c",
        "push_two_shot": "ef95fc1222aeeed7",
        "push_two_shot_lamport": "542c4cbbef82bc49",
        "push_two_shot_lamport_specialized": "e099fce48419718d",
        "push_two_shot_two_kernel": "6e5980538f5f2ce1",
        "registered": "5a225e96990931df",
        "torch_symm_mem": "4b9ab606f8f7000a",
        "two_shot": "8a39c5100fcf9083",
    },
    "matmul_reduce_scatter": {
        "baseline": "cde6edf04c7e7ceb",
        "one_shot": "da833c68a7e19775",
        "overlap": "34454767ce1b4024",
        "push": "619257ce07a1b9d0",
        "push_lamport": "685d7aee9c9d9f41",
        "push_lamport_specialized": "5573e08af31b73eb",
        "push_two_kernel": "947570344bb8ed79",
        "registered": "98e12ea1d405da12",
        "torch_fused": "2b341f24aa445336",
    },
}

VERSIONS = {text: 1 for known in HASHES_OF_VERSION_1.values() for text in known.values()}
