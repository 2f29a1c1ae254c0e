"""The live page of a run, served by the coordinator while there are viewers.

snapshot          the run at one moment, as values
recent            the newest events, versions and counts, bounded
collector         snapshots of Redis, with a coordinator's rights
journal_follower  norms, distances and cosines of the newest updates, from the journal
flow, stalled, alarms, panels    figures of a snapshot, as HTML
broadcast         one collector for all viewers; it pauses without viewers
rendering         the page as HTML, and its changed parts
sessions          logins
operator_actions  retry of dead letters, end of the run
recorded_pages    the recorded run's pages, if the coordinator can read the journal
service           routes and permissions
"""
