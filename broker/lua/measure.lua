-- keys: tasks owners
-- How many entries of the trainers' streams are under a lease that holds.
local group, lease_ms = unpack(ARGV)
local streams, leased = {[key.tasks] = true}, 0
for _, owner in ipairs(redis.call('HVALS', key.owners)) do streams[stream_of(owner)] = true end
for stream in pairs(streams) do
  local pending = redis.pcall('XPENDING', stream, group)
  if pending.err then
    if not string.find(pending.err, 'NOGROUP') then return pending end -- no trainer was ever there
  else
    local over = redis.call('XPENDING', stream, group, 'IDLE', lease_ms, '-', '+', 10000)
    leased = leased + pending[1] - #over
  end
end
return leased
