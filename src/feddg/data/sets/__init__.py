"""The data sets known by name, one definition in one file each; see :mod:`feddg.data.data_set`."""
