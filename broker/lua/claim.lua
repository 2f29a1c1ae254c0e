-- keys: stream
-- Takes over what was idle for long enough, and shows what was delivered `most` times: poison. Of
-- what is taken quietly the last delivery was no fault of the entry.
local group, me, idle, most, only, limit, how = unpack(ARGV)
most, limit = tonumber(most) + (how == 'quiet' and 1 or 0), tonumber(limit)
local taken, poison, from = {}, {}, '-'
repeat -- on to the end where poison, or what may not be taken, fills a page
  local window = only ~= '' and {from, '+', limit, only} or {'IDLE', idle, from, '+', limit}
  local page = redis.pcall('XPENDING', key.stream, group, unpack(window))
  if page.err then
    if string.find(page.err, 'NOGROUP') then return {{}, {}} end
    return page
  end
  for _, row in ipairs(page) do
    local id, deliveries = row[1], row[4]
    from = '(' .. id
    local entry = redis.call('XRANGE', key.stream, id, id)[1]
    if not entry then
      redis.call('XACK', key.stream, group, id) -- deleted, but still pending
    elseif deliveries >= most then
      poison[#poison + 1] = {entry, deliveries}
    elseif me ~= '' and #taken < limit then
      if how == 'quiet' then
        redis.call('XCLAIM', key.stream, group, me, 0, id, 'JUSTID') -- counts no delivery
      else
        redis.call('XCLAIM', key.stream, group, me, 0, id)
      end
      taken[#taken + 1] = entry
    end
  end
until #page < limit or #taken >= limit
return {taken, poison}
