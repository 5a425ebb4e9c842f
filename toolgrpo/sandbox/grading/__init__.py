"""Does a program pass its tests? Runs in the client's process; what it judges and what judges are
confined processes.
"""

from toolgrpo.sandbox.grading.grade import SuiteGrade, forgeable_because, grade

__all__ = ["SuiteGrade", "forgeable_because", "grade"]
