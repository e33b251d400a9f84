import json, os, sys, time, subprocess, shutil
import numpy as np, torch
import efcil.network.fused as F
from efcil.data.augment import make_augmentation, Normalisation
from efcil.data.store import TaskImages
from efcil.engine.first_task import FirstTask
from efcil.engine.trainer import Execution, Trainer
from efcil.methods import get
from efcil.methods.base import Task
from efcil.network.incremental import IncrementalNetwork
from efcil.network.resnet import make_backbone
from efcil.settings import Recipe
dev = torch.device('cuda')
def data_for(n, s, q, dtype, size=32):
    rng = np.random.default_rng(0)
    return TaskImages(rng.integers(0,256,(n,size,size,3),dtype=np.uint8), s + rng.integers(0,q,n), augmentation=make_augmentation('padded-resized-crop'),
      normalisation=Normalisation((.5,)*3,(.25,)*3), device=dev, seed=0, name='t', dtype=dtype)
def efc_trainer(ex, s=50, q=10, n=5000, B=64):
    net = IncrementalNetwork(make_backbone('resnet18-small', 0).to(dev))
    net.add_head(s); m = get('efc')(net); m.to(dev); ex.equip(m); net.eval()
    g = torch.Generator(device=dev).manual_seed(0)
    m.means = torch.rand(s,512,device=dev,generator=g); 
    m.covariances = torch.eye(512,device=dev).repeat(s,1,1)*.1; m.covariance_of=torch.arange(s,device=dev)
    a = torch.randn(512,50,device=dev,generator=g)*.05; m.feature_matrix = a@a.T
    task = Task(1, s, q, 0, B); m.begin_task(task)
    return Trainer(m, data_for(n,s,q,ex.dtype), task, Recipe(learning_rate=1e-4,epochs=100,batch_size=B), ex)
def first_trainer(ex, q=10, n=5000, B=64):
    net = IncrementalNetwork(make_backbone('resnet18-small', 0).to(dev))
    task = Task(0,0,q,0,B); m = FirstTask(net, task, True); ex.equip(m)
    return Trainer(m, data_for(n,0,q,ex.dtype), task, Recipe(learning_rate=1e-3,epochs=100,batch_size=B,rotations=True), ex)
def time_steps(tr, steps=200, loads=3):
    f = tr.feed; f.load(0,0); tr.optimiser.begin_block(0, f.block_steps, 1.0)
    full = f.block_steps-1
    def sweep(count):
        done=0
        while done<count:
            tr._place.zero_(); tr.optimiser.skip(0)
            k=min(full,count-done)
            for i in range(k): tr._step(i, 64)
            done+=k
    sweep(8); torch.cuda.synchronize()
    t=time.perf_counter(); sweep(steps); torch.cuda.synchronize(); step=(time.perf_counter()-t)/steps
    t=time.perf_counter()
    for e in range(loads): f.load(e+1,0)
    torch.cuda.synchronize(); load=(time.perf_counter()-t)/loads
    return step*1e3, load*1e3
def stream_run(fn):
    with torch.cuda.stream(torch.cuda.Stream()): return fn()
def report(name, fn):
    try:
        t=time.perf_counter(); r=stream_run(fn); print(f'{name:50s} step {r[0]:7.3f} ms  load {r[1]:7.2f} ms  (all {time.perf_counter()-t:5.1f} s)', flush=True)
    except Exception as e:
        import traceback; traceback.print_exc(); print(name,'FAILED',e, flush=True)
fused = Execution(dev, True, True, True)
plain = Execution(dev, True, False, True)
eager = Execution(dev, True, False, False)
torch.backends.cudnn.benchmark=True
torch.backends.cuda.matmul.allow_tf32=False
print('mps', shutil.which('nvidia-cuda-mps-control'), os.cpu_count(), torch.__version__)
report('efc fused captured', lambda: time_steps(efc_trainer(fused)))
report('efc fused captured s=10', lambda: time_steps(efc_trainer(fused,10,10)))
report('efc plain captured', lambda: time_steps(efc_trainer(plain)))
report('first fused captured', lambda: time_steps(first_trainer(fused)))
report('first plain captured', lambda: time_steps(first_trainer(plain),60))
orig=F.FusedBackbone.__init__
def noside(self,*a):
    orig(self,*a); self._side=None
F.FusedBackbone.__init__=noside
report('efc fused no side stream', lambda: time_steps(efc_trainer(fused)))
report('first fused no side stream', lambda: time_steps(first_trainer(fused)))
F.FusedBackbone.__init__=orig
torch.backends.cudnn.benchmark=False
report('efc fused cudnn heuristics', lambda: time_steps(efc_trainer(fused)))
report('first fused cudnn heuristics', lambda: time_steps(first_trainer(fused)))
torch.backends.cudnn.benchmark=True
# cudnn fused conv+bias+relu
try:
    x=torch.randn(84,64,32,32,device=dev,dtype=torch.bfloat16).to(memory_format=torch.channels_last); w=(torch.randn(64,64,3,3,device=dev,dtype=torch.bfloat16)*.05).to(memory_format=torch.channels_last); b=torch.randn(64,device=dev,dtype=torch.bfloat16)
    def bench(f,n=50):
        for _ in range(5): f()
        g=torch.cuda.CUDAGraph(); torch.cuda.synchronize()
        with torch.cuda.graph(g):
            for _ in range(n): f()
        g.replay(); torch.cuda.synchronize(); t=time.perf_counter(); g.replay(); torch.cuda.synchronize(); return (time.perf_counter()-t)/n*1e6
    import efcil.network.kernels as K
    bf=b.float()
    print('conv only us', bench(lambda: torch.conv2d(x,w,padding=1)))
    print('conv+kernel us', bench(lambda: K.bias_relu(torch.conv2d(x,w,padding=1),bf)))
    print('cudnn_convolution_relu us', bench(lambda: torch.cudnn_convolution_relu(x,w,b,[1,1],[1,1],[1,1],1)))
    print('cudnn_convolution_add_relu us', bench(lambda: torch.cudnn_convolution_add_relu(x,w,x,1.0,b,[1,1],[1,1],[1,1],1)))
    ref=torch.relu(torch.conv2d(x.float(),w.float(),bf,padding=1)+x.float()); got=torch.cudnn_convolution_add_relu(x,w,x,1.0,b,[1,1],[1,1],[1,1],1).float(); print('err',((ref-got).norm()/ref.norm()).item(), got.is_contiguous(memory_format=torch.channels_last))
    for (n,c,o,s,k,st) in [(84,3,64,32,3,1),(84,8,64,32,3,1),(84,64,64,32,3,1),(84,64,128,32,3,2),(84,128,128,16,3,1),(84,128,256,16,3,2),(84,256,256,8,3,1),(84,256,512,8,3,2),(84,512,512,4,3,1),(84,64,128,32,1,2),(256,64,64,32,3,1),(256,128,128,16,3,1),(256,256,256,8,3,1),(256,512,512,4,3,1)]:
        x=torch.randn(n,c,s,s,device=dev,dtype=torch.bfloat16).to(memory_format=torch.channels_last); w=(torch.randn(o,c,k,k,device=dev,dtype=torch.bfloat16)*.05).to(memory_format=torch.channels_last)
        p=k//2; y=torch.conv2d(x,w,stride=st,padding=p); g=torch.randn_like(y)
        cb=lambda m: torch.ops.aten.convolution_backward(g,x,w,None,(st,st),(p,p),(1,1),False,(0,0),1,m)
        fl=2*y.numel()*c*k*k
        r=[bench(lambda: torch.conv2d(x,w,stride=st,padding=p)),bench(lambda: cb([True,False,False])),bench(lambda: cb([False,True,False]))]
        print((n,c,o,s,k,st),'fwd dgrad wgrad us',[round(v,1) for v in r],'TF/s',[round(fl/v/1e6) for v in r], flush=True)
except Exception as e: import traceback; traceback.print_exc()
from torch.profiler import profile, ProfilerActivity
def prof(name,tr):
    f=tr.feed; f.load(0,0); tr.optimiser.begin_block(0,f.block_steps,1.0); tr._place.zero_()
    for i in range(8): tr._step(i,64)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for i in range(8,18): tr._step(i,64)
        torch.cuda.synchronize()
    rows=sorted(p.key_averages(), key=lambda e:-e.device_time_total)
    tot=sum(e.device_time_total for e in rows)/10; n=sum(e.count for e in rows)/10
    print(f'== {name}: kernel sum {tot:.0f} us, {n:.0f} kernels per step')
    for e in rows[:32]: print(f'{e.device_time_total/10:8.1f} us x{e.count/10:5.1f}  {e.key[:110]}')
stream_run(lambda: prof('efc', efc_trainer(fused)))
stream_run(lambda: prof('first', first_trainer(fused)))
