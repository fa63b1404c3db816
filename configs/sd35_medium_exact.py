"""The twin of sd35_medium_jagg that back-propagates through every trained step, to compare with."""

import dataclasses

from configs.sd35_medium_jagg import CONFIG as JAGG

CONFIG = dataclasses.replace(JAGG, plan="exact")
