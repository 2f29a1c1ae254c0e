"""A run as it is now, in the browser: served by the coordinator while somebody looks.

snapshot              all that the page shows of one moment, as values
recent, collector  what a run did lately; snapshots of what Redis has, with a coordinator's rights
following          updates as vectors, read along in the journal
panel, panels      what is drawn of a snapshot
broadcast          one collector for all viewers; it rests while there is none
rendering          the page as HTML, and its parts as they change
sessions, acting   who has logged in; what operators may do
past               the recorded run's pages, where the journal can be read
service            routes, and who may ask for which
"""
