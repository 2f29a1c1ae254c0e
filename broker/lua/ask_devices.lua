-- keys: evaluation evaluations measured counts
-- undeclared: owners tasks alive concurrent open
-- Opens tasks of an evaluation while they are fewer than a share of the workers, and of all tasks in
-- flight unless none trains: each goes to the device's owner, or else to the pool. A device that has or had one gets no other, so the request may
-- be repeated. ARGV: the evaluation's id, the share, and for each task its id, the device, the
-- message. Returns how many of the devices, in order, have or had a task, and how many tasks may be
-- open; 0 and 0 if the evaluation is over.
local id, share = ARGV[1], tonumber(ARGV[2])
if redis.call('HGET', key.evaluation, 'id') ~= id then return {0, 0} end
local owners = {}
for i = 3, #ARGV, 3 do
  owners[i] = redis.call('HGET', key.owners, ARGV[i + 1])
  redis.call('EXISTS', stream_of(owners[i])) -- fails here while a cluster migrates it
end
guard()
local opened, training = redis.call('HLEN', key.evaluations), redis.call('HLEN', key.open)
local most = share * workers()
if training > 0 and share < 1 then most = math.min(most, training * share / (1 - share)) end
most = math.max(1, math.floor(most))
local settled = 0
for i = 3, #ARGV, 3 do
  local task, device, owner = ARGV[i], ARGV[i + 1], owners[i]
  if redis.call('HEXISTS', key.evaluations, device) + redis.call('HEXISTS', key.measured, device) == 0 then
    if opened >= most then break end
    local entry = redis.call('XADD', stream_of(owner), '*', 'm', ARGV[i + 2])
    redis.call('HSET', key.evaluations, device, cmsgpack.pack({
      task = task, site = owner and site_of(owner) or 'pool', owner = owner or false, entry = entry,
    }))
    count('evaluations')
    opened = opened + 1
  end
  settled = settled + 1
end
return {settled, most}
