-- keys: stream
local group, me, idle, most, only, limit, how = unpack(ARGV)
local window = only ~= '' and {'-', '+', limit, only} or {'IDLE', idle, '-', '+', limit}
local waiting = redis.pcall('XPENDING', key.stream, group, unpack(window))
if waiting.err then
  if string.find(waiting.err, 'NOGROUP') then return {{}, {}} end
  return waiting
end
local taken, poison = {}, {}
for _, row in ipairs(waiting) do
  local id, deliveries = row[1], row[4]
  local entry = redis.call('XRANGE', key.stream, id, id)[1]
  if not entry then
    redis.call('XACK', key.stream, group, id) -- deleted, but still pending
  elseif deliveries >= tonumber(most) then
    poison[#poison + 1] = {entry, deliveries}
  elseif me ~= '' then
    if how == 'quiet' then
      redis.call('XCLAIM', key.stream, group, me, 0, id, 'JUSTID') -- counts no delivery
    else
      redis.call('XCLAIM', key.stream, group, me, 0, id)
    end
    taken[#taken + 1] = entry
  end
end
return {taken, poison}
