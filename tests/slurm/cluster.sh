#!/bin/bash
# A temporary two-node Slurm on one machine, for tests: cluster.sh DIRECTORY. Needs root; installs missing Debian packages.
#
# It runs until it is killed, and all its processes with it. DIRECTORY/ready appears when the nodes are up. Clients (sbatch,
# scontrol, ...) need SLURM_CONF=DIRECTORY/slurm.conf and this script's network: nsenter --net -t PID.
#
# Each node has its own network (10.77.0.x), process IDs, mounts and host name, so that a wrong master address, a port in
# use or an unshared directory behave as they do between two machines. Exit status 77: this machine cannot do that.
set -euo pipefail
STATE=$1
FREEZER=/sys/fs/cgroup/freezer
PACKAGES="munge slurmctld slurmd slurm-client"
export PATH=$PATH:/usr/sbin:/sbin SLURM_CONF=$STATE/slurm.conf

skip() { echo "cluster.sh: $*" >&2; exit 77; }

install_packages() {
  local policy=/usr/sbin/policy-rc.d created=''
  [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' > $policy; chmod 755 $policy; created=1; }  # starts no daemons
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $PACKAGES >"$STATE/apt.out" 2>&1 || true
  [ -z "$created" ] || rm -f $policy
  type munged slurmctld slurmd sbatch >/dev/null 2>&1 || skip "could not install $PACKAGES; run apt-get update first"
}

write_config() {
  local tracking=linuxproc
  [ ! -w $FREEZER ] || tracking=cgroup  # a signal reaches only the first process of a task, as on production clusters
  mkdir -p "$STATE"/{munge,ctld,spool.node1,spool.node2}
  (umask 077; head -c 128 /dev/urandom > "$STATE/munge/key")
  printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 node1' '10.77.0.2 node2' > "$STATE/hosts"
  for gpu in gpu0 gpu1; do mknod "$STATE/$gpu" c 1 3; done  # /dev/null plays the GPU
  echo "NodeName=node[1-2] Name=gpu File=$STATE/gpu[0-1]" > "$STATE/gres.conf"
  printf '%s\n' CgroupPlugin=cgroup/v1 CgroupMountpoint=${FREEZER%/*} CgroupAutomount=no > "$STATE/cgroup.conf"
  # FirstJobId: clusters that run at the same time share their nodes' cgroups, so their job IDs must differ.
  cat > "$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=localhost(10.77.0.254)
SlurmctldPort=17000
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$STATE/munge/socket,cred_expire=5
ProctrackType=proctrack/$tracking
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
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
StateSaveLocation=$STATE/ctld
SlurmdSpoolDir=$STATE/spool.%n
SlurmctldPidFile=$STATE/ctld.pid
SlurmdPidFile=$STATE/slurmd.%n.pid
GresTypes=gpu
NodeName=node1 NodeAddr=10.77.0.1 Port=17001 CPUs=8 RealMemory=16000 Gres=gpu:2
NodeName=node2 NodeAddr=10.77.0.2 Port=17002 CPUs=8 RealMemory=16000 Gres=gpu:2
PartitionName=main Nodes=node[1-2] Default=YES PriorityTier=1 GraceTime=20
PartitionName=high Nodes=node[1-2] PriorityTier=2 PreemptMode=OFF
END
}

start_node() {
  local number=$1
  # shellcheck disable=SC2016
  unshare --net --uts --mount --pid --fork --mount-proc -- bash -c '
    hostname "node$1"; mount --bind "$2/hosts" /etc/hosts
    ip link set lo up; until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
    ip addr add "10.77.0.$1/24" dev eth0; ip link set eth0 up
    slurmd -N "node$1" -D & wait; sleep infinity' slurmd "$number" "$STATE" &> "$STATE/node$number.out" &
  until pgrep -P $! > "$STATE/first"; do sleep 0.05; done
  ip link add "veth$number" type veth peer name eth0 netns "$(head -n1 "$STATE/first")"
  ip link set "veth$number" master br0 up
}

if [ "${2:-}" != inside ]; then
  [ "$(id -u)" = 0 ] || skip "needs root for network namespaces and slurmd"
  unshare --net --pid --fork --mount-proc true 2>/dev/null || skip "this machine does not allow creating namespaces"
  type munged slurmctld slurmd sbatch >/dev/null 2>&1 || install_packages
  write_config
  exec unshare --net --pid --fork --kill-child --mount-proc -- "$0" "$STATE" inside
fi
munged -F --key-file="$STATE/munge/key" --socket="$STATE/munge/socket" --pid-file="$STATE/munge/pid" \
  --log-file="$STATE/munge/log" --seed-file="$STATE/munge/seed" &> "$STATE/munged.out" &
ip link set lo up; ip link add br0 type bridge; ip addr add 10.77.0.254/24 dev br0; ip link set br0 up
until munge -S "$STATE/munge/socket" -n &> /dev/null; do sleep 0.05; done
slurmctld -D -c &> "$STATE/slurmctld.out" &
for number in 1 2; do start_node $number; done
until [ "$(sinfo -h -N -p main -t idle -o %N 2>/dev/null | wc -l)" = 2 ]; do sleep 0.1; done
touch "$STATE/ready"
wait
