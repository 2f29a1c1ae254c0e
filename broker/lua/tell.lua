-- keys:
-- undeclared: events
redis.call('XADD', key.events, 'MAXLEN', '~', EVENTS_KEPT, '*', 'm', ARGV[1])
