-- keys: stream
-- Claims entries that have been idle for long enough, and reports poison: entries delivered `most`
-- times. A quiet claim doesn't blame the entry for its last delivery. With `largest`, for streams
-- that others fill, a larger entry is claimed without its fields, but with their size in bytes, and
-- the claim ends after `parts` times `largest` bytes.
local group, me, idle, most, only, limit, how, largest, parts = unpack(ARGV)
most, limit = tonumber(most) + (how == 'quiet' and 1 or 0), tonumber(limit)
largest = tonumber(largest) or math.huge
local left = largest * (tonumber(parts) or 1)
local taken, poison, from = {}, {}, '-'

local function size_of(entry)
  local size = 0
  for _, part in ipairs(entry[2]) do size = size + #part end
  return size
end

repeat -- read on if a page is full of poison or of entries that can't be claimed
  local window = only ~= '' and {from, '+', limit, only} or {'IDLE', idle, from, '+', limit}
  local page = redis.pcall('XPENDING', key.stream, group, unpack(window))
  if page.err then
    if string.find(page.err, 'NOGROUP') then return {{}, {}} end
    return page
  end
  for _, row in ipairs(page) do
    if left <= 0 then break end
    local id, deliveries = row[1], row[4]
    from = '(' .. id
    local entry = redis.call('XRANGE', key.stream, id, id)[1]
    local size = entry and size_of(entry)
    left = left - (size or 0)
    if not entry then
      redis.call('XACK', key.stream, group, id) -- deleted, but still pending
    elseif size > largest then
      redis.call('XCLAIM', key.stream, group, me, 0, id, 'JUSTID')
      taken[#taken + 1] = {id, {}, size}
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
until #page < limit or #taken >= limit or left <= 0
return {taken, poison}
