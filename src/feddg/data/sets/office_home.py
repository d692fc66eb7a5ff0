"""Office-Home: 65 classes of things in offices and homes, in four domains."""

from pathlib import Path

from feddg.data.augmentations import AugmentSettings
from feddg.data.data_set import DataSet, Publication, register_data_set
from feddg.data.images import ImageTable
from feddg.data.published import load_published
from feddg.data.sets.pardon_protocol import PARDON_PROTOCOL
from feddg.settings import merge

AROUND = (
    "OfficeHomeDataset_10072016",
    "OfficeHomeDataset",
    "OfficeHome",
    "office_home_dg",
    "images",
)
"""Folders that the archives in circulation put around the domains."""
SPELLINGS = {"Real": "Real_World"}
"""Beside ``Real World`` (the archive's), ``Real_World``, ``RealWorld`` and ``real_world``."""
PARTS = {"train": "train", "val": "id_val", "test": "id_test"}
"""Dassl has these between domain and class."""
# In the order of a case-sensitive sort, as folder readers number them.
CLASSES = """
    Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair
    Clipboards Computer Couch Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops
    Flowers Folder Fork Glasses Hammer Helmet Kettle Keyboard Knives Lamp_Shade Laptop Marker
    Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil Postit_Notes Printer Push_Pin
    Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon TV Table
    Telephone ToothBrush Toys Trash_Can Webcam
"""


def list_office_home(root: Path | None) -> ImageTable:
    """Office-Home, from the folder of its four domains or one around it; Dassl's split is kept.

    Domains are Art, Clipart, Product and Real_World, whatever the spelling of their folders; labels
    are in alphabetical order. Image counts that differ from the published ones are logged as a
    warning, since copies differ.

    Raises:
        DataError: a domain is missing, or a class folder is not one of the 65.
    """
    return load_published(OFFICE_HOME, root, AROUND, SPELLINGS, PARTS)


OFFICE_HOME = register_data_set(
    DataSet(
        name="office_home",
        summary="Office-Home (Venkateswara et al. 2017): 65 classes as art, clipart, product photo "
        "and real-world photo",
        load=list_office_home,
        preset=merge(PARDON_PROTOCOL, {"train": {"augmentation": "office_home"}}),
        domains=("Art", "Clipart", "Product", "Real_World"),
        # PARDON's Table I.
        validated_by={
            "Art": "Clipart",
            "Clipart": "Real_World",
            "Real_World": "Product",
            "Product": "Art",
        },
        # PARDON's training transform for Office-Home (official code).
        augmentation=AugmentSettings(
            crop_scale=(0.7, 1.0), flip=0.5, color_jitter=(0.4, 0.4, 0.4, 0.4), grayscale=0.1
        ),
        classes=tuple(CLASSES.split()),
        counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real_World": 4357},
        publication=Publication(
            citation="H. Venkateswara, J. Eusebio, S. Chakraborty and S. Panchanathan, Deep "
            "Hashing Network for Unsupervised Domain Adaptation, CVPR 2017",
            address="https://www.hemanthdv.org/officeHomeDataset.html",
            licence="for non-commercial research and education (the authors' fair-use notice)",
            steps=(
                "Open the address, read the authors' notice and follow their download link.",
                "Unpack OfficeHomeDataset_10072016.zip and give the folder as --root.",
            ),
        ),
        layouts=(
            "`OfficeHomeDataset_10072016/{Art,Clipart,Product,Real World}/<class>`; the fourth "
            "also `Real_World`, `RealWorld`, `real_world` or `real`",
            "`office_home_dg/{art,clipart,product,real_world}/{train,val}/<class>` (Dassl)",
        ),
        protocol="one or two domains held out (PARDON's Tables I and II)",
    )
)
