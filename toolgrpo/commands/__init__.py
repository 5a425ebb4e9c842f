"""Commands: arguments, files of settings, what a terminal shows,
and the commands themselves.
"""
