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
        8004000b jb 0FFFFFFFF80040127h
        80040011 mov rax,gs:[1FBC0h]
        8004001a cmp dword ptr [rax+9B8h],1
        80040021 ja 0FFFFFFFF80040127h
        80040027 rdtsc
        80040029 shl rdx,20h
        8004002d lea r11,[rax+rdx]
        80040031 mov rax,[0FFFFFFFF80100000h]
        80040039 lea rcx,[rax+1]
        8004003d cmp rcx,[0FFFFFFFF80100040h]
        80040045 ja 0FFFFFFFF80040135h
        8004004b lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040055 jne short 0FFFFFFFF80040039h
        80040057 and eax,3FFh
        8004005c shl eax,6
        8004005f mov [rax-7FEFEFF8h],r11
        80040066 lea r11,[rax-7FEFF000h]
        8004006d mov rax,[rsp]
        80040071 mov [r11+10h],rax
        80040075 mov qword ptr [r11+18h],0
        8004007d mov rax,gs:[1FBC0h]
        80040086 inc dword ptr [rax+9B8h]
        8004008c mov rax,rdi
        8004008f add rax,8
        80040095 mov rdx,800000000000h
        8004009f add rdx,rax
        800400a2 jae 0FFFFFFFF80040144h
        800400a8 cmp rax,0FFFFFFFFFFFFE000h
        800400ae ja 0FFFFFFFF80040144h
        800400b4 call 0FFFFFFFF81A000D0h
        800400b9 test eax,eax
        800400bb jne 0FFFFFFFF80040144h
        800400c1 mov rax,rdx
        800400c4 mov rdx,800000000000h
        800400ce add rdx,rax
        800400d1 jae short 0FFFFFFFF80040144h
        800400d3 cmp rax,0FFFFFFFFFFFFE000h
        800400d9 ja short 0FFFFFFFF80040144h
        800400db call 0FFFFFFFF81A00090h
        800400e0 test eax,eax
        800400e2 jne short 0FFFFFFFF80040144h
        800400e4 mov [r11+20h],edx
        800400e8 mov rax,gs:[1FBC0h]
        800400f1 dec dword ptr [rax+9B8h]
        800400f7 mov [r11],ecx
        800400fa mov dword ptr [r11+4],1000009h
        80040102 sub rcx,[0FFFFFFFF80100048h]
        8004010a cmp rcx,1
        8004010e jb short 0FFFFFFFF80040140h
        80040110 pop rax
        80040111 xchg al,ah
        80040113 and al,8
        80040115 add al,78h
        80040117 sahf
        80040118 pop r11
        8004011a pop rdx
        8004011b pop rcx
        8004011c pop rax
        8004011d nop [rax+rax]
        80040122 jmp 0FFFFFFFF81234565h
        80040127 pop rax
        80040128 xchg al,ah
        8004012a and al,8
        8004012c add al,78h
        8004012e sahf
        8004012f pop r11
        80040131 pop rdx
        80040132 pop rcx
        80040133 pop rax
        80040134 int3
        80040135 lock inc qword ptr [0FFFFFFFF80100080h]
        8004013e jmp short 0FFFFFFFF80040110h
        80040140 out 5Eh,al
        80040142 jmp short 0FFFFFFFF80040110h
        80040144 or dword ptr [r11+18h],1
        80040149 jmp short 0FFFFFFFF800400E8h
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
        8004000f jb 0FFFFFFFF800401B8h
        80040015 mov rax,gs:[1FBC0h]
        8004001e cmp dword ptr [rax+9B8h],1
        80040025 ja 0FFFFFFFF800401B8h
        8004002b rdtsc
        8004002d shl rdx,20h
        80040031 lea r11,[rax+rdx]
        80040035 mov rax,[0FFFFFFFF80100000h]
        8004003d lea rcx,[rax+1]
        80040041 cmp rcx,[0FFFFFFFF80100040h]
        80040049 ja 0FFFFFFFF800401CAh
        8004004f lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040059 jne short 0FFFFFFFF8004003Dh
        8004005b and eax,3FFh
        80040060 shl eax,6
        80040063 mov [rax-7FEFEFF8h],r11
        8004006a lea r11,[rax-7FEFF000h]
        80040071 mov rax,[rsp]
        80040075 mov [r11+10h],rax
        80040079 mov qword ptr [r11+18h],0
        80040081 mov rax,gs:[1FBC0h]
        8004008a inc dword ptr [rax+9B8h]
        80040090 mov rax,[rsp+18h]
        80040095 mov rdx,800000000000h
        8004009f add rdx,rax
        800400a2 jae short 0FFFFFFFF80040108h
        800400a4 cmp rax,0FFFFFFFFFFFFE000h
        800400aa ja short 0FFFFFFFF80040108h
        800400ac mov rsi,rax
        800400af mov rdi,0FEFEFEFEFEFEFEFFh
        800400b9 mov r8,8080808080808080h
        800400c3 call 0FFFFFFFF81A000D0h
        800400c8 mov [r11+20h],rdx
        800400cc add rdx,rdi
        800400cf test rdx,r8
        800400d2 jne 0FFFFFFFF800401D9h
        800400d8 lea rax,[rsi+8]
        800400dc call 0FFFFFFFF81A000D0h
        800400e1 mov [r11+28h],rdx
        800400e5 add rdx,rdi
        800400e8 test rdx,r8
        800400eb jne 0FFFFFFFF80040204h
        800400f1 lea rax,[rsi+10h]
        800400f5 call 0FFFFFFFF81A000D0h
        800400fa test eax,eax
        800400fc jne 0FFFFFFFF80040230h
        80040102 mov [r11+30h],rdx
        80040106 jmp short 0FFFFFFFF80040175h
        80040108 mov rdx,7FFFFFFFF000h
        80040112 cmp rax,rdx
        80040115 jae 0FFFFFFFF800403BFh
        8004011b mov rsi,rax
        8004011e mov rdi,0FEFEFEFEFEFEFEFFh
        80040128 mov r8,8080808080808080h
        80040132 call 0FFFFFFFF81A000C0h
        80040137 mov [r11+20h],rdx
        8004013b add rdx,rdi
        8004013e test rdx,r8
        80040141 jne 0FFFFFFFF800402CEh
        80040147 lea rax,[rsi+8]
        8004014b call 0FFFFFFFF81A000C0h
        80040150 mov [r11+28h],rdx
        80040154 add rdx,rdi
        80040157 test rdx,r8
        8004015a jne 0FFFFFFFF800402F9h
        80040160 lea rax,[rsi+10h]
        80040164 call 0FFFFFFFF81A000C0h
        80040169 test eax,eax
        8004016b jne 0FFFFFFFF80040325h
        80040171 mov [r11+30h],rdx
        80040175 mov rax,gs:[1FBC0h]
        8004017e dec dword ptr [rax+9B8h]
        80040184 mov [r11],ecx
        80040187 mov dword ptr [r11+4],1000009h
        8004018f sub rcx,[0FFFFFFFF80100048h]
        80040197 cmp rcx,1
        8004019b jb short 0FFFFFFFF800401D5h
        8004019d pop rax
        8004019e xchg al,ah
        800401a0 and al,8
        800401a2 add al,78h
        800401a4 sahf
        800401a5 pop r8
        800401a7 pop rdi
        800401a8 pop rsi
        800401a9 pop r11
        800401ab pop rdx
        800401ac pop rcx
        800401ad pop rax
        800401ae nop [rax+rax]
        800401b3 jmp 0FFFFFFFF81234565h
        800401b8 pop rax
        800401b9 xchg al,ah
        800401bb and al,8
        800401bd add al,78h
        800401bf sahf
        800401c0 pop r8
        800401c2 pop rdi
        800401c3 pop rsi
        800401c4 pop r11
        800401c6 pop rdx
        800401c7 pop rcx
        800401c8 pop rax
        800401c9 int3
        800401ca lock inc qword ptr [0FFFFFFFF80100080h]
        800401d3 jmp short 0FFFFFFFF8004019Dh
        800401d5 out 5Eh,al
        800401d7 jmp short 0FFFFFFFF8004019Dh
        800401d9 test eax,eax
        800401db jne short 0FFFFFFFF800401F5h
        800401dd mov rax,[r11+20h]
        800401e1 not rax
        800401e4 and rdx,rax
        800401e7 test rdx,r8
        800401ea je 0FFFFFFFF800400D8h
        800401f0 jmp 0FFFFFFFF80040106h
        800401f5 lea rdi,[r11+20h]
        800401f9 mov r8d,3
        800401ff jmp 0FFFFFFFF80040293h
        80040204 test eax,eax
        80040206 jne short 0FFFFFFFF80040220h
        80040208 mov rax,[r11+28h]
        8004020c not rax
        8004020f and rdx,rax
        80040212 test rdx,r8
        80040215 je 0FFFFFFFF800400F1h
        8004021b jmp 0FFFFFFFF80040106h
        80040220 add rsi,8
        80040224 lea rdi,[r11+28h]
        80040228 mov r8d,2
        8004022e jmp short 0FFFFFFFF80040293h
        80040230 add rsi,10h
        80040234 lea rdi,[r11+30h]
        80040238 mov r8d,1
        8004023e jmp short 0FFFFFFFF80040293h
        80040240 mov rax,rsi
        80040243 call 0FFFFFFFF81A000D0h
        80040248 test eax,eax
        8004024a jne short 0FFFFFFFF80040293h
        8004024c mov [rdi],rdx
        8004024f mov rax,0FEFEFEFEFEFEFEFFh
        80040259 add rax,rdx
        8004025c not rdx
        8004025f and rdx,rax
        80040262 mov rax,8080808080808080h
        8004026c test rdx,rax
        8004026f jne 0FFFFFFFF80040106h
        80040275 add rsi,8
        80040279 add rdi,8
        8004027d test edi,38h
        80040283 jne short 0FFFFFFFF80040289h
        80040285 add rdi,8
        80040289 dec r8d
        8004028c jne short 0FFFFFFFF80040240h
        8004028e jmp 0FFFFFFFF80040106h
        80040293 mov rax,rsi
        80040296 call 0FFFFFFFF81A00010h
        8004029b test eax,eax
        8004029d jne short 0FFFFFFFF800402B9h
        8004029f mov [rdi],dl
        800402a1 test dl,dl
        800402a3 je 0FFFFFFFF80040106h
        800402a9 inc rsi
        800402ac inc rdi
        800402af test edi,7
        800402b5 jne short 0FFFFFFFF80040293h
        800402b7 jmp short 0FFFFFFFF8004027Dh
        800402b9 lea rax,[r11+34h]
        800402bd cmp rdi,rax
        800402c0 jb 0FFFFFFFF800403BFh
        800402c6 mov byte ptr [rdi],1
        800402c9 jmp 0FFFFFFFF80040106h
        800402ce test eax,eax
        800402d0 jne short 0FFFFFFFF800402EAh
        800402d2 mov rax,[r11+20h]
        800402d6 not rax
        800402d9 and rdx,rax
        800402dc test rdx,r8
        800402df je 0FFFFFFFF80040147h
        800402e5 jmp 0FFFFFFFF80040175h
        800402ea lea rdi,[r11+20h]
        800402ee mov r8d,3
        800402f4 jmp 0FFFFFFFF80040388h
        800402f9 test eax,eax
        800402fb jne short 0FFFFFFFF80040315h
        800402fd mov rax,[r11+28h]
        80040301 not rax
        80040304 and rdx,rax
        80040307 test rdx,r8
        8004030a je 0FFFFFFFF80040160h
        80040310 jmp 0FFFFFFFF80040175h
        80040315 add rsi,8
        80040319 lea rdi,[r11+28h]
        8004031d mov r8d,2
        80040323 jmp short 0FFFFFFFF80040388h
        80040325 add rsi,10h
        80040329 lea rdi,[r11+30h]
        8004032d mov r8d,1
        80040333 jmp short 0FFFFFFFF80040388h
        80040335 mov rax,rsi
        80040338 call 0FFFFFFFF81A000C0h
        8004033d test eax,eax
        8004033f jne short 0FFFFFFFF80040388h
        80040341 mov [rdi],rdx
        80040344 mov rax,0FEFEFEFEFEFEFEFFh
        8004034e add rax,rdx
        80040351 not rdx
        80040354 and rdx,rax
        80040357 mov rax,8080808080808080h
        80040361 test rdx,rax
        80040364 jne 0FFFFFFFF80040175h
        8004036a add rsi,8
        8004036e add rdi,8
        80040372 test edi,38h
        80040378 jne short 0FFFFFFFF8004037Eh
        8004037a add rdi,8
        8004037e dec r8d
        80040381 jne short 0FFFFFFFF80040335h
        80040383 jmp 0FFFFFFFF80040175h
        80040388 mov rax,rsi
        8004038b call 0FFFFFFFF81A00000h
        80040390 test eax,eax
        80040392 jne short 0FFFFFFFF800403AEh
        80040394 mov [rdi],dl
        80040396 test dl,dl
        80040398 je 0FFFFFFFF80040175h
        8004039e inc rsi
        800403a1 inc rdi
        800403a4 test edi,7
        800403aa jne short 0FFFFFFFF80040388h
        800403ac jmp short 0FFFFFFFF80040372h
        800403ae lea rax,[r11+34h]
        800403b2 cmp rdi,rax
        800403b5 jb short 0FFFFFFFF800403BFh
        800403b7 mov byte ptr [rdi],1
        800403ba jmp 0FFFFFFFF80040175h
        800403bf or dword ptr [r11+18h],1
        800403c4 jmp 0FFFFFFFF80040175h
    "#]]
    .assert_eq(&made(&capture));
}
