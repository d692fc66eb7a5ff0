"""Checks of what is one's own: what feddg demands of its own methods and data sets.

>>> from feddg.testing import check_data_set, check_method
>>> check_method(MyMethod)
>>> check_data_set(list_mydata, "/data/mydata")
"""

from feddg.testing.data_sets import DataSetFault as DataSetFault
from feddg.testing.data_sets import check_data_set as check_data_set
from feddg.testing.methods import CHECKS as CHECKS
from feddg.testing.methods import Fault as Fault
from feddg.testing.methods import MethodFault as MethodFault
from feddg.testing.methods import check_method as check_method
