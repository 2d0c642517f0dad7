"""What a run takes of memory, before anything is loaded: functions of config.json, configuration
and machine.
"""
