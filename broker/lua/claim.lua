-- keys: stream
-- Takes over what was idle for long enough, and shows what was delivered `most` times: poison. Of
-- what is taken quietly the last delivery was no fault of the entry. Where others fill the stream
-- (`largest`), a larger entry is taken without its fields, but with their bytes, and after the bytes of
-- so many `parts` of that size no more is looked at.
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

repeat -- on to the end where poison, or what may not be taken, fills a page
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
