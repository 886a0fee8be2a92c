#!/bin/bash
# A temporary two-node Slurm on one machine, for tests. Needs root; `start` installs the Debian packages it lacks.
#
#   cluster.sh start        start munge, slurmctld and two nodes; print the path of slurm.conf
#   cluster.sh run CMD...   run a client (sbatch, scontrol, ...) in the controller's network
#   cluster.sh crash NODE   kill everything on a node at once, like a power failure
#   cluster.sh boot NODE    start a crashed node again
#   cluster.sh stop         kill every process that start and boot started
#
# Each node has its own network (10.77.0.x), process IDs, mounts and host name, so that a wrong master address, a port in
# use or an unshared directory behave as they do between two machines. All state is in SLURM_TEST_DIR.
set -euo pipefail

STATE=${SLURM_TEST_DIR:-${TMPDIR:-/tmp}/hf-fsdp-slurm}
LOGS=$STATE/log
FREEZER=/sys/fs/cgroup/freezer
PACKAGES="munge slurmctld slurmd slurm-client"
export SLURM_CONF=$STATE/slurm.conf PATH=$PATH:/usr/sbin:/sbin

# ---- processes: a pid file holds pid and start time, so that no other process that reuses the pid is ever killed

start_time() { awk '{ sub(/^.*\) /, ""); if ($1 != "Z") print $20 }' "/proc/$1/stat" 2>/dev/null || true; }
pid_of()     { cut -d' ' -f1 "$STATE/$1.pid"; }
is_alive() {
  local pid began
  [ -f "$STATE/$1.pid" ] && read -r pid began < "$STATE/$1.pid" && [ -n "$began" ] && [ "$(start_time "$pid")" = "$began" ]
}
launch() {
  local name=$1; shift
  setsid "$@" </dev/null >"$LOGS/$name.out" 2>&1 &
  echo "$! $(start_time $!)" > "$STATE/$name.pid"
}
end() {
  local name=$1 signal=$2
  if is_alive "$name"; then kill "-$signal" "$(pid_of "$name")" || true; wait_until 5 is_gone "$name" || kill -KILL "$(pid_of "$name")"; fi
  rm -f "$STATE/$name.pid"
}
is_gone()    { ! is_alive "$1"; }
wait_until() { local deadline=$((SECONDS + $1)); shift; until "$@"; do [ $SECONDS -lt $deadline ] || return 1; sleep 0.05; done; }
die()        { echo "cluster.sh: $*" >&2; exit 1; }
skip()       { echo "cluster.sh: $*" >&2; exit 77; }  # this machine cannot run the cluster

# ---- set-up

install_packages() {
  type munged slurmctld slurmd sbatch >/dev/null 2>&1 && return
  type apt-get >/dev/null 2>&1 || skip "no slurmctld, and no apt-get to install it with: $PACKAGES"
  local policy=/usr/sbin/policy-rc.d created='' get="apt-get install -y -q --no-install-recommends $PACKAGES"
  # Keeps the packages from starting their own daemons.
  [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' > $policy; chmod 755 $policy; created=1; }
  export DEBIAN_FRONTEND=noninteractive
  { $get || { apt-get update -q && $get; }; } >"$LOGS/apt.out" 2>&1 </dev/null || true
  [ -z "$created" ] || rm -f $policy
  type munged slurmctld slurmd sbatch >/dev/null 2>&1 || skip "apt-get could not install $PACKAGES: $(tail -n1 "$LOGS/apt.out")"
}

write_config() {
  # With cgroup, a signal reaches only the first process of a task, as on production clusters.
  local tracking=linuxproc
  [ ! -w $FREEZER ] || tracking=cgroup
  mkdir -p "$STATE"/{munge,ctld,spool.node1,spool.node2}
  chmod 755 "$STATE" "$STATE/munge"
  [ -s "$STATE/munge/key" ] || (umask 077; head -c 128 /dev/urandom > "$STATE/munge/key")
  printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 node1' '10.77.0.2 node2' > "$STATE/hosts"
  for gpu in gpu0 gpu1; do [ -c "$STATE/$gpu" ] || mknod "$STATE/$gpu" c 1 3; done  # /dev/null plays the GPU
  echo "NodeName=node[1-2] Name=gpu File=$STATE/gpu[0-1]" > "$STATE/gres.conf"
  printf '%s\n' CgroupPlugin=cgroup/v1 CgroupMountpoint=${FREEZER%/*} CgroupAutomount=no > "$STATE/cgroup.conf"
  # FirstJobId: clusters that run at the same time share their nodes' cgroups, so their job IDs must differ.
  cat > "$STATE/slurm.conf" <<END
ClusterName=test
SlurmctldHost=localhost(10.77.0.254)
SlurmctldPort=17000
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$STATE/munge/socket,cred_expire=5
ProctrackType=proctrack/$tracking
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
MinJobAge=3600
FirstJobId=$((1000 + RANDOM))
KillWait=10
SlurmdTimeout=10
ReturnToService=2
StateSaveLocation=$STATE/ctld
SlurmdSpoolDir=$STATE/spool.%n
SlurmctldPidFile=$STATE/ctld.daemon
SlurmdPidFile=$STATE/slurmd.%n.daemon
SlurmctldLogFile=$LOGS/slurmctld.log
SlurmdLogFile=$LOGS/slurmd.%n.log
GresTypes=gpu
NodeName=node1 NodeHostname=node1 NodeAddr=10.77.0.1 Port=17001 CPUs=8 RealMemory=16000 Gres=gpu:2
NodeName=node2 NodeHostname=node2 NodeAddr=10.77.0.2 Port=17002 CPUs=8 RealMemory=16000 Gres=gpu:2
PartitionName=main Nodes=node[1-2] Default=YES PriorityTier=1 GraceTime=20
PartitionName=high Nodes=node[1-2] PriorityTier=2 PreemptMode=OFF
END
}

# ---- the daemons

client()        { nsenter -t "$(pid_of slurmctld)" -n -- "$@"; }
munge_answers() { munge -S "$STATE/munge/socket" -n >/dev/null 2>&1; }
ctld_answers()  { client scontrol ping 2>/dev/null | grep -q 'is UP'; }
nodes_are_up()  { [ "$(client sinfo -h -N -p main -t idle,alloc,mix,comp -o %N 2>/dev/null | wc -l)" = 2 ]; }

start_munge() {
  launch munged munged -F --key-file="$STATE/munge/key" --socket="$STATE/munge/socket" --pid-file="$STATE/munge/daemon" \
    --log-file="$STATE/munge/log" --seed-file="$STATE/munge/seed"
  wait_until 10 munge_answers || die "munged does not answer: $(tail -n1 "$LOGS/munged.out")"
}

start_controller() {
  launch slurmctld unshare --net -- bash -c '
    ip link set lo up; ip link add br0 type bridge; ip addr add 10.77.0.254/24 dev br0; ip link set br0 up
    exec slurmctld -D -c'
  wait_until 20 ctld_answers || die "slurmctld does not answer: $(tail -n1 "$LOGS/slurmctld.out" "$LOGS/slurmctld.log")"
}

first_process() { pgrep -P "$(pid_of "$1")" > "$STATE/first.$1"; }

boot() {
  local node=$1 number=${1#node}
  # --kill-child: if the process in the pid file dies, the node's first process dies, and with it all other processes.
  # shellcheck disable=SC2016
  launch "$node" unshare --net --uts --mount --pid --fork --kill-child --mount-proc -- bash -c '
    hostname "$1"; mount --bind "$2/hosts" /etc/hosts
    ip link set lo up; until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
    ip addr add "10.77.0.$3/24" dev eth0; ip link set eth0 up
    slurmd -N "$1" -D & wait; sleep infinity' slurmd "$node" "$STATE" "$number"
  wait_until 5 first_process "$node" || die "$node did not start: $(tail -n1 "$LOGS/$node.out")"
  client ip link del "veth$number" 2>/dev/null || true  # left over from a crash
  client ip link add "veth$number" type veth peer name eth0 netns "$(head -n1 "$STATE/first.$node")"
  client ip link set "veth$number" master br0 up
}

crash() {
  client ip link set "veth${1#node}" down  # first, or the node's dying processes could still notify other nodes
  end "$1" KILL
}

start() {
  [ "$(id -u)" = 0 ] || skip "needs root for network namespaces and slurmd"
  unshare --net --pid --fork --mount-proc true 2>/dev/null || skip "this machine does not allow creating namespaces"
  mkdir -p "$LOGS"
  stop
  install_packages
  write_config
  start_munge
  start_controller
  for node in node1 node2; do boot $node; done
  wait_until 30 nodes_are_up || die "the nodes did not come up; logs are in $LOGS"
  echo "$SLURM_CONF"
}

stop() {
  end slurmctld TERM
  for node in node1 node2; do end $node KILL; done
  end munged TERM
  rm -rf "$STATE/ctld" "$STATE"/spool.*
  for node in node1 node2; do
    [ ! -d $FREEZER/slurm_$node ] || find $FREEZER/slurm_$node -depth -type d -exec rmdir {} \; 2>/dev/null || true
  done
}

case ${1:-} in
  start | stop) "$1" ;;
  run) shift; client "$@" ;;
  crash) crash "$2" ;;
  boot) boot "$2" ;;
  *) sed -n '2,11p' "$0"; exit 2 ;;
esac
