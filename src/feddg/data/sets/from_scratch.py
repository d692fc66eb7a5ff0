"""What an experiment without pretrained weights is filled in with: a small network that learns."""

from feddg.data.data_set import SCRATCH, DataSet, register_data_set

register_data_set(
    DataSet(
        name=SCRATCH,
        summary="a small network for any images, trained without pretrained weights",
        instead="it is no data set but what stands in for a preset with pretrained weights where "
        "there are none. Name your images as the source: --data folder --root FOLDER",
        preset={
            "data": {"image_size": 64},
            "model": {"backbone": "cnn", "weights": None, "embedding": "none"},
            "train": {"rounds": 30, "local_epochs": 2, "batch_size": 16, "lr": 1e-3},
        },
    )
)
