"""Stands in for Flower Datasets, as :mod:`datasets` beside it does for Hugging Face's."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from datasets import Split, load_dataset

from flwr_datasets.partitioner import IidPartitioner


class FederatedDataset:
    """The training data in equal parts, drawn at random."""

    def __init__(self, dataset: str, partitioners: dict[str, IidPartitioner]) -> None:
        self._dataset, self._partitions = dataset, partitioners["train"].num_partitions

    @cached_property
    def _data(self) -> Split:
        return load_dataset(self._dataset, "train")

    def load_partition(self, partition: int) -> Split:
        """One part."""
        order = np.random.default_rng(42).permutation(len(self._data))
        return self._data.rows(order[partition :: self._partitions])
