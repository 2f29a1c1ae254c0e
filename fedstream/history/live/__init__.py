"""The live page of a run, served by the coordinator while there are viewers.

snapshot, recent, collector    the run at one moment, read from Redis
flow, stalled, alarms, panels    figures of a snapshot, as HTML
broadcast                      one collector for all viewers; it pauses without viewers
sessions, operator_actions     logins; retry of dead letters, end of the run
service                        routes and permissions
"""
