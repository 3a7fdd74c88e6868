"""The twelve two-dimensional sets of MedMNIST v2 (Yang et al., 2023): one `.npz` file each, 28×28, in three parts."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.base import DataSet, LoadedData, Part
from fedveil.tasks.datasets.statistics import statistics
from fedveil.tasks.formats.npz import read_npz
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.sources import find_files

ORGANS = (
    "bladder",
    "left femur",
    "right femur",
    "heart",
    "left kidney",
    "right kidney",
    "liver",
    "left lung",
    "right lung",
    "pancreas",
    "spleen",
)
FINDINGS = (
    "atelectasis",
    "cardiomegaly",
    "effusion",
    "infiltration",
    "mass",
    "nodule",
    "pneumonia",
    "pneumothorax",
    "consolidation",
    "edema",
    "emphysema",
    "fibrosis",
    "pleural",
    "hernia",
)


class MedImages(DataSet):
    """Base of the sets. A subclass states its classes, whether it is in color, and channel statistics if given."""

    class_names: ClassVar[tuple[str, ...]]
    channels: ClassVar[int] = 1
    several: ClassVar[bool] = False  # labels per image
    given: ClassVar[tuple[float, float] | None] = None  # mean and standard deviation

    def load(self, root: Path | None = None) -> LoadedData:
        """Read NAME.npz from root/medmnist/, root/NAME/ or root/."""
        path = find_files(self.name, root)[f"{self.name}.npz"]
        color = (3,) if self.channels == 3 else ()
        shapes: dict[str, tuple[int | None, ...]] = {}
        for part in ("train", "val", "test"):
            shapes[f"{part}_images"] = (None, 28, 28, *color)
            shapes[f"{part}_labels"] = (None, len(self.class_names) if self.several else 1)
        arrays = read_npz(path, shapes)
        train, validation, test = (
            Part(self._images(path, arrays[f"{part}_images"]), self._labels(arrays[f"{part}_labels"]))
            for part in ("train", "val", "test")
        )
        known = None if self.given is None else Normalization((self.given[0],), (self.given[1],))
        return LoadedData(
            name=self.name,
            train=train,
            validation=validation,
            test=test,
            normalization=known or statistics(train, path),
            class_names=self.class_names,
        )

    def _images(self, path: Path, values: np.ndarray) -> np.ndarray:
        if values.dtype != np.uint8:
            raise FedveilError(f"{path}: its images are {values.dtype}, expected uint8")
        return values[:, None] if self.channels == 1 else np.ascontiguousarray(values.transpose(0, 3, 1, 2))

    def _labels(self, values: np.ndarray) -> np.ndarray:
        return values.astype(np.float32) if self.several else values[:, 0].astype(np.int64)


@datasets.register("pathmnist")
@declared
class PathMNIST(MedImages):
    """Colorectal cancer tissue, color 28×28, 9 classes, 89,996 + 10,004 + 7,180."""

    class_names = (
        "adipose",
        "background",
        "debris",
        "lymphocytes",
        "mucus",
        "smooth muscle",
        "normal colon mucosa",
        "cancer-associated stroma",
        "colorectal adenocarcinoma epithelium",
    )
    channels = 3


@datasets.register("chestmnist")
@declared
class ChestMNIST(MedImages):
    """Chest X-rays, gray 28×28, 14 labels of which an image has any number, 78,468 + 11,219 + 22,433."""

    class_names = FINDINGS
    several = True


@datasets.register("dermamnist")
@declared
class DermaMNIST(MedImages):
    """Pigmented skin lesions, color 28×28, 7 classes, 7,007 + 1,003 + 2,005."""

    class_names = (
        "actinic keratoses and intraepithelial carcinoma",
        "basal cell carcinoma",
        "benign keratosis-like lesions",
        "dermatofibroma",
        "melanoma",
        "melanocytic nevi",
        "vascular lesions",
    )
    channels = 3


@datasets.register("octmnist")
@declared
class OCTMNIST(MedImages):
    """Retinal optical coherence tomography, gray 28×28, 4 classes, 97,477 + 10,832 + 1,000."""

    class_names = ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal")


@datasets.register("pneumoniamnist")
@declared
class PneumoniaMNIST(MedImages):
    """Chest X-rays of children, gray 28×28, normal or pneumonia, 4,708 + 524 + 624."""

    class_names = ("normal", "pneumonia")
    given = (0.5719, 0.1684)


@datasets.register("retinamnist")
@declared
class RetinaMNIST(MedImages):
    """Eye fundus, color 28×28, 5 grades of diabetic retinopathy, 1,080 + 120 + 400."""

    class_names = ("0", "1", "2", "3", "4")
    channels = 3


@datasets.register("breastmnist")
@declared
class BreastMNIST(MedImages):
    """Breast ultrasound, gray 28×28, malignant or not, 546 + 78 + 156."""

    class_names = ("malignant", "normal or benign")
    given = (0.3276, 0.2057)


@datasets.register("bloodmnist")
@declared
class BloodMNIST(MedImages):
    """Blood cells, color 28×28, 8 classes, 11,959 + 1,712 + 3,421."""

    class_names = (
        "basophil",
        "eosinophil",
        "erythroblast",
        "immature granulocyte",
        "lymphocyte",
        "monocyte",
        "neutrophil",
        "platelet",
    )
    channels = 3


@datasets.register("tissuemnist")
@declared
class TissueMNIST(MedImages):
    """Kidney cortex cells, gray 28×28, 8 classes, 165,466 + 23,640 + 47,280."""

    class_names = (
        "collecting duct, connecting tubule",
        "distal convoluted tubule",
        "glomerular endothelial cell",
        "interstitial endothelial cell",
        "leukocyte",
        "podocyte",
        "proximal tubule segment",
        "thick ascending limb",
    )


@datasets.register("organamnist")
@declared
class OrganAMNIST(MedImages):
    """Organs in axial CT slices, gray 28×28, 11 classes, 34,581 + 6,491 + 17,778."""

    class_names = ORGANS


@datasets.register("organcmnist")
@declared
class OrganCMNIST(MedImages):
    """Organs in coronal CT slices, gray 28×28, 11 classes, 13,000 + 2,392 + 8,268."""

    class_names = ORGANS


@datasets.register("organsmnist")
@declared
class OrganSMNIST(MedImages):
    """Organs in sagittal CT slices, gray 28×28, 11 classes, 13,940 + 2,452 + 8,829."""

    class_names = ORGANS
