use super::*;
use crate::fetch::{Base, Fetched, Memory, Pointer, Read};

#[test]
fn a_detour_reads_memory_by_calls_of_the_kernels_own_code() {
    let reader = |at: u64| [0, 1, 2, 3].map(|size| Gva(at + 0x40 * size));
    let pointer = |offset, memory| Pointer { offset, memory };
    let mut capture = Capture {
        registers: RegisterSet::from_iter([]),
        fetching: Some(Fetching {
            readers: Readers {
                kernel: reader(0xffff_ffff_81a0_0010),
                process: reader(0xffff_ffff_81a0_0000),
                kernel_half: Gva(0xffff_8000_0000_0000),
                process_end: Gva(0x7fff_ffff_f000),
                current: 0x1_fbc0,
                disabled: 0x9b8,
            },
            items: vec![Fetched {
                base: Base::Register(Gpr::Rdi),
                pointers: vec![pointer(8, Memory::Kernel), pointer(0, Memory::Kernel)],
                read: Read::Bytes(4),
            }],
        }),
        ..Capture::default()
    };
    let span = span("0f1f440000");
    let made = |capture: &Capture| {
        let member = Member {
            conditions: &[],
            vetoed: VETOED,
            part: record(capture),
        };
        let recorder = Recorder::new(&span, &RING, &[member]).unwrap();
        let detour = recorder.place(DETOUR).unwrap();
        assert!(detour.escape().is_some());
        text(detour.code(), DETOUR)
    };
    expect![[r#"
        80040000 push rax
        80040001 push rcx
        80040002 push rdx
        80040003 push r11
        80040005 pushfq
        80040006 bt dword ptr [rsp],12h
        8004000b jb 0FFFFFFFF80040126h
        80040011 mov rax,gs:[1FBC0h]
        8004001a cmp dword ptr [rax+9B8h],1
        80040021 ja 0FFFFFFFF80040126h
        80040027 rdtsc
        80040029 shl rdx,20h
        8004002d lea r11,[rax+rdx]
        80040031 mov rax,[0FFFFFFFF80100000h]
        80040039 lea rcx,[rax+1]
        8004003d cmp rcx,[0FFFFFFFF80100040h]
        80040045 ja 0FFFFFFFF80040134h
        8004004b lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040055 jne short 0FFFFFFFF80040039h
        80040057 and eax,3FFh
        8004005c shl eax,6
        8004005f mov [rax-7FEFEFF8h],r11
        80040066 lea r11,[rax-7FEFF000h]
        8004006d mov eax,[rsp]
        80040070 mov [r11+14h],eax
        80040074 mov qword ptr [r11+18h],0
        8004007c mov rax,gs:[1FBC0h]
        80040085 inc dword ptr [rax+9B8h]
        8004008b mov rax,rdi
        8004008e add rax,8
        80040094 mov rdx,800000000000h
        8004009e add rdx,rax
        800400a1 jae 0FFFFFFFF80040143h
        800400a7 cmp rax,0FFFFFFFFFFFFE000h
        800400ad ja 0FFFFFFFF80040143h
        800400b3 call 0FFFFFFFF81A000D0h
        800400b8 test eax,eax
        800400ba jne 0FFFFFFFF80040143h
        800400c0 mov rax,rdx
        800400c3 mov rdx,800000000000h
        800400cd add rdx,rax
        800400d0 jae short 0FFFFFFFF80040143h
        800400d2 cmp rax,0FFFFFFFFFFFFE000h
        800400d8 ja short 0FFFFFFFF80040143h
        800400da call 0FFFFFFFF81A00090h
        800400df test eax,eax
        800400e1 jne short 0FFFFFFFF80040143h
        800400e3 mov [r11+20h],edx
        800400e7 mov rax,gs:[1FBC0h]
        800400f0 dec dword ptr [rax+9B8h]
        800400f6 mov [r11],ecx
        800400f9 mov dword ptr [r11+4],1000009h
        80040101 sub rcx,[0FFFFFFFF80100048h]
        80040109 cmp rcx,1
        8004010d jb short 0FFFFFFFF8004013Fh
        8004010f pop rax
        80040110 xchg al,ah
        80040112 and al,8
        80040114 add al,78h
        80040116 sahf
        80040117 pop r11
        80040119 pop rdx
        8004011a pop rcx
        8004011b pop rax
        8004011c nop [rax+rax]
        80040121 jmp 0FFFFFFFF81234565h
        80040126 pop rax
        80040127 xchg al,ah
        80040129 and al,8
        8004012b add al,78h
        8004012d sahf
        8004012e pop r11
        80040130 pop rdx
        80040131 pop rcx
        80040132 pop rax
        80040133 int3
        80040134 lock inc qword ptr [0FFFFFFFF80100080h]
        8004013d jmp short 0FFFFFFFF8004010Fh
        8004013f out 5Eh,al
        80040141 jmp short 0FFFFFFFF8004010Fh
        80040143 or dword ptr [r11+18h],1
        80040148 jmp short 0FFFFFFFF800400E7h
    "#]]
    .assert_eq(&made(&capture));
    let fetching = capture.fetching.as_mut().unwrap();
    fetching.items[0] = Fetched {
        base: Base::Register(Gpr::Rsi),
        pointers: vec![pointer(0, Memory::Either)],
        read: Read::Text(20),
    };
    expect![[r#"
        80040000 push rax
        80040001 push rcx
        80040002 push rdx
        80040003 push r11
        80040005 push rsi
        80040006 push rdi
        80040007 push r8
        80040009 pushfq
        8004000a bt dword ptr [rsp],12h
        8004000f jb 0FFFFFFFF800401B7h
        80040015 mov rax,gs:[1FBC0h]
        8004001e cmp dword ptr [rax+9B8h],1
        80040025 ja 0FFFFFFFF800401B7h
        8004002b rdtsc
        8004002d shl rdx,20h
        80040031 lea r11,[rax+rdx]
        80040035 mov rax,[0FFFFFFFF80100000h]
        8004003d lea rcx,[rax+1]
        80040041 cmp rcx,[0FFFFFFFF80100040h]
        80040049 ja 0FFFFFFFF800401C9h
        8004004f lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040059 jne short 0FFFFFFFF8004003Dh
        8004005b and eax,3FFh
        80040060 shl eax,6
        80040063 mov [rax-7FEFEFF8h],r11
        8004006a lea r11,[rax-7FEFF000h]
        80040071 mov eax,[rsp]
        80040074 mov [r11+14h],eax
        80040078 mov qword ptr [r11+18h],0
        80040080 mov rax,gs:[1FBC0h]
        80040089 inc dword ptr [rax+9B8h]
        8004008f mov rax,[rsp+18h]
        80040094 mov rdx,800000000000h
        8004009e add rdx,rax
        800400a1 jae short 0FFFFFFFF80040107h
        800400a3 cmp rax,0FFFFFFFFFFFFE000h
        800400a9 ja short 0FFFFFFFF80040107h
        800400ab mov rsi,rax
        800400ae mov rdi,0FEFEFEFEFEFEFEFFh
        800400b8 mov r8,8080808080808080h
        800400c2 call 0FFFFFFFF81A000D0h
        800400c7 mov [r11+20h],rdx
        800400cb add rdx,rdi
        800400ce test rdx,r8
        800400d1 jne 0FFFFFFFF800401D8h
        800400d7 lea rax,[rsi+8]
        800400db call 0FFFFFFFF81A000D0h
        800400e0 mov [r11+28h],rdx
        800400e4 add rdx,rdi
        800400e7 test rdx,r8
        800400ea jne 0FFFFFFFF80040203h
        800400f0 lea rax,[rsi+10h]
        800400f4 call 0FFFFFFFF81A000D0h
        800400f9 test eax,eax
        800400fb jne 0FFFFFFFF8004022Fh
        80040101 mov [r11+30h],rdx
        80040105 jmp short 0FFFFFFFF80040174h
        80040107 mov rdx,7FFFFFFFF000h
        80040111 cmp rax,rdx
        80040114 jae 0FFFFFFFF800403BEh
        8004011a mov rsi,rax
        8004011d mov rdi,0FEFEFEFEFEFEFEFFh
        80040127 mov r8,8080808080808080h
        80040131 call 0FFFFFFFF81A000C0h
        80040136 mov [r11+20h],rdx
        8004013a add rdx,rdi
        8004013d test rdx,r8
        80040140 jne 0FFFFFFFF800402CDh
        80040146 lea rax,[rsi+8]
        8004014a call 0FFFFFFFF81A000C0h
        8004014f mov [r11+28h],rdx
        80040153 add rdx,rdi
        80040156 test rdx,r8
        80040159 jne 0FFFFFFFF800402F8h
        8004015f lea rax,[rsi+10h]
        80040163 call 0FFFFFFFF81A000C0h
        80040168 test eax,eax
        8004016a jne 0FFFFFFFF80040324h
        80040170 mov [r11+30h],rdx
        80040174 mov rax,gs:[1FBC0h]
        8004017d dec dword ptr [rax+9B8h]
        80040183 mov [r11],ecx
        80040186 mov dword ptr [r11+4],1000009h
        8004018e sub rcx,[0FFFFFFFF80100048h]
        80040196 cmp rcx,1
        8004019a jb short 0FFFFFFFF800401D4h
        8004019c pop rax
        8004019d xchg al,ah
        8004019f and al,8
        800401a1 add al,78h
        800401a3 sahf
        800401a4 pop r8
        800401a6 pop rdi
        800401a7 pop rsi
        800401a8 pop r11
        800401aa pop rdx
        800401ab pop rcx
        800401ac pop rax
        800401ad nop [rax+rax]
        800401b2 jmp 0FFFFFFFF81234565h
        800401b7 pop rax
        800401b8 xchg al,ah
        800401ba and al,8
        800401bc add al,78h
        800401be sahf
        800401bf pop r8
        800401c1 pop rdi
        800401c2 pop rsi
        800401c3 pop r11
        800401c5 pop rdx
        800401c6 pop rcx
        800401c7 pop rax
        800401c8 int3
        800401c9 lock inc qword ptr [0FFFFFFFF80100080h]
        800401d2 jmp short 0FFFFFFFF8004019Ch
        800401d4 out 5Eh,al
        800401d6 jmp short 0FFFFFFFF8004019Ch
        800401d8 test eax,eax
        800401da jne short 0FFFFFFFF800401F4h
        800401dc mov rax,[r11+20h]
        800401e0 not rax
        800401e3 and rdx,rax
        800401e6 test rdx,r8
        800401e9 je 0FFFFFFFF800400D7h
        800401ef jmp 0FFFFFFFF80040105h
        800401f4 lea rdi,[r11+20h]
        800401f8 mov r8d,3
        800401fe jmp 0FFFFFFFF80040292h
        80040203 test eax,eax
        80040205 jne short 0FFFFFFFF8004021Fh
        80040207 mov rax,[r11+28h]
        8004020b not rax
        8004020e and rdx,rax
        80040211 test rdx,r8
        80040214 je 0FFFFFFFF800400F0h
        8004021a jmp 0FFFFFFFF80040105h
        8004021f add rsi,8
        80040223 lea rdi,[r11+28h]
        80040227 mov r8d,2
        8004022d jmp short 0FFFFFFFF80040292h
        8004022f add rsi,10h
        80040233 lea rdi,[r11+30h]
        80040237 mov r8d,1
        8004023d jmp short 0FFFFFFFF80040292h
        8004023f mov rax,rsi
        80040242 call 0FFFFFFFF81A000D0h
        80040247 test eax,eax
        80040249 jne short 0FFFFFFFF80040292h
        8004024b mov [rdi],rdx
        8004024e mov rax,0FEFEFEFEFEFEFEFFh
        80040258 add rax,rdx
        8004025b not rdx
        8004025e and rdx,rax
        80040261 mov rax,8080808080808080h
        8004026b test rdx,rax
        8004026e jne 0FFFFFFFF80040105h
        80040274 add rsi,8
        80040278 add rdi,8
        8004027c test edi,38h
        80040282 jne short 0FFFFFFFF80040288h
        80040284 add rdi,8
        80040288 dec r8d
        8004028b jne short 0FFFFFFFF8004023Fh
        8004028d jmp 0FFFFFFFF80040105h
        80040292 mov rax,rsi
        80040295 call 0FFFFFFFF81A00010h
        8004029a test eax,eax
        8004029c jne short 0FFFFFFFF800402B8h
        8004029e mov [rdi],dl
        800402a0 test dl,dl
        800402a2 je 0FFFFFFFF80040105h
        800402a8 inc rsi
        800402ab inc rdi
        800402ae test edi,7
        800402b4 jne short 0FFFFFFFF80040292h
        800402b6 jmp short 0FFFFFFFF8004027Ch
        800402b8 lea rax,[r11+34h]
        800402bc cmp rdi,rax
        800402bf jb 0FFFFFFFF800403BEh
        800402c5 mov byte ptr [rdi],1
        800402c8 jmp 0FFFFFFFF80040105h
        800402cd test eax,eax
        800402cf jne short 0FFFFFFFF800402E9h
        800402d1 mov rax,[r11+20h]
        800402d5 not rax
        800402d8 and rdx,rax
        800402db test rdx,r8
        800402de je 0FFFFFFFF80040146h
        800402e4 jmp 0FFFFFFFF80040174h
        800402e9 lea rdi,[r11+20h]
        800402ed mov r8d,3
        800402f3 jmp 0FFFFFFFF80040387h
        800402f8 test eax,eax
        800402fa jne short 0FFFFFFFF80040314h
        800402fc mov rax,[r11+28h]
        80040300 not rax
        80040303 and rdx,rax
        80040306 test rdx,r8
        80040309 je 0FFFFFFFF8004015Fh
        8004030f jmp 0FFFFFFFF80040174h
        80040314 add rsi,8
        80040318 lea rdi,[r11+28h]
        8004031c mov r8d,2
        80040322 jmp short 0FFFFFFFF80040387h
        80040324 add rsi,10h
        80040328 lea rdi,[r11+30h]
        8004032c mov r8d,1
        80040332 jmp short 0FFFFFFFF80040387h
        80040334 mov rax,rsi
        80040337 call 0FFFFFFFF81A000C0h
        8004033c test eax,eax
        8004033e jne short 0FFFFFFFF80040387h
        80040340 mov [rdi],rdx
        80040343 mov rax,0FEFEFEFEFEFEFEFFh
        8004034d add rax,rdx
        80040350 not rdx
        80040353 and rdx,rax
        80040356 mov rax,8080808080808080h
        80040360 test rdx,rax
        80040363 jne 0FFFFFFFF80040174h
        80040369 add rsi,8
        8004036d add rdi,8
        80040371 test edi,38h
        80040377 jne short 0FFFFFFFF8004037Dh
        80040379 add rdi,8
        8004037d dec r8d
        80040380 jne short 0FFFFFFFF80040334h
        80040382 jmp 0FFFFFFFF80040174h
        80040387 mov rax,rsi
        8004038a call 0FFFFFFFF81A00000h
        8004038f test eax,eax
        80040391 jne short 0FFFFFFFF800403ADh
        80040393 mov [rdi],dl
        80040395 test dl,dl
        80040397 je 0FFFFFFFF80040174h
        8004039d inc rsi
        800403a0 inc rdi
        800403a3 test edi,7
        800403a9 jne short 0FFFFFFFF80040387h
        800403ab jmp short 0FFFFFFFF80040371h
        800403ad lea rax,[r11+34h]
        800403b1 cmp rdi,rax
        800403b4 jb short 0FFFFFFFF800403BEh
        800403b6 mov byte ptr [rdi],1
        800403b9 jmp 0FFFFFFFF80040174h
        800403be or dword ptr [r11+18h],1
        800403c3 jmp 0FFFFFFFF80040174h
    "#]]
    .assert_eq(&made(&capture));
}
