"""The built-in data sets, one definition each; see :mod:`feddg.data.data_set`."""
