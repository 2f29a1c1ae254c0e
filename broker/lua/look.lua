-- keys:
-- undeclared: run head open admitted queue triggers sites counts alive kept dead owners pool events models
-- Everything countable, and the ids of the newest event and version: the view includes all up to
-- them. ARGV[1]: 1 to count the inboxes as well. There is one per site, and the scheduler looks at
-- every version, so it leaves them out.
local function newest(stream)
  local entry = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  return entry and entry[1] or '0-0'
end
local said = ARGV[1] == '1' and 0
for _, site in ipairs(said and redis.call('SMEMBERS', key.sites) or {}) do
  said = said + redis.call('XLEN', prefix .. 'inbox:' .. site)
end
local owned = redis.call('HKEYS', key.owners)
local now = redis.call('TIME')
return {
  redis.call('HGETALL', key.run), redis.call('HGETALL', key.head), redis.call('HGETALL', key.counts),
  redis.call('HVALS', key.open), redis.call('HLEN', key.admitted), redis.call('XLEN', key.queue),
  redis.call('XLEN', key.triggers), said, redis.call('ZCOUNT', key.alive, '(0', '+inf'),
  redis.call('ZCARD', key.kept), redis.call('XLEN', key.dead), owned,
  #owned > 0 and pool_serves() and 1 or 0,
  newest(key.events), newest(key.models), now[1] .. '.' .. string.format('%06d', now[2]),
}
